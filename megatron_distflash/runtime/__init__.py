"""Running plans on tensors. Knows torch, not Megatron."""
