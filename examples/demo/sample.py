"""Prints a sample from a checkpoint, reloaded by transformers alone.

Run: python examples/demo/sample.py runs/demo/checkpoint
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    torch.manual_seed(0)
    prompt = torch.tensor([list(b"    def __init__(self")])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_length=128, do_sample=True, temperature=0.7, pad_token_id=0
    )
    print(f"sample from {sys.argv[1]}, reloaded by {type(model).__name__}.from_pretrained:")
    print(bytes(tokens[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
