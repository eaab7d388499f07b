"""The parts of megatron-distflash that know Megatron; importing this imports nothing else."""
