"""Object stores and web servers, through obstore."""
