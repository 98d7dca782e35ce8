"""torch_ddp."""
