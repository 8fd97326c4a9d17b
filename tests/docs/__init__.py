"""What the documentation shows is run: every block of every page, every picture's script, the site itself."""
