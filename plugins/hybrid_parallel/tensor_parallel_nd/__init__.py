"""Tensor parallelism on grids of ranks: 2D, 2.5D and 3D; see Note [Grids of tensor-parallel ranks]."""

from __future__ import annotations
