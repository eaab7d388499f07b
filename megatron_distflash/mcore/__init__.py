"""The parts of megatron-distflash that know Megatron. Importing this package imports nothing else."""
