"""Frames over a process group of torch.distributed. Knows nothing of torch: see `group`."""
