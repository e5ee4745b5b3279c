"""Multi-head latent attention over a DeviceView: expanded for prompts, absorbed for everything else."""
