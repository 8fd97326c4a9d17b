"""What a save may do besides: one folder for each."""
