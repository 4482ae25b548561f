"""Starting programs: warm, under torchrun, on Ray."""
