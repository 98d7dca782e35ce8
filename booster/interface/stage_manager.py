"""Place of a rank in the pipeline, with the methods of ColossalAI's `PipelineStageManager`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageManager:
    """Stage of this rank; by default the only one.

    Attributes:
        stage: Index of the stage.
        num_stages: Number of stages.
        has_last_layer: If True, this rank computes the loss. With pp_style="zbv" that is stage 0.
    """

    stage: int = 0
    num_stages: int = 1
    has_last_layer: bool = True

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """Return whether this rank holds the model's first layer. `ignore_chunk` has no effect."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """Return whether this rank holds the model's last layer. `ignore_chunk` has no effect."""
        return self.has_last_layer
