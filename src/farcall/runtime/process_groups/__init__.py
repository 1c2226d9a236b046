"""Process groups as torch makes them, for the transport over them, which knows nothing of torch."""
