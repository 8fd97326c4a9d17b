"""holdfast inside the trainers that people use; a file for each. Never imported by the rest of the library."""
