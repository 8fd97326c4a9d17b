"""What people see while holdfast works: listeners of its events. Never part of a save or a load."""
