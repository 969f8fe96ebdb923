"""What a run needs around the model: devices, checkpoints, run directories, exit codes."""
