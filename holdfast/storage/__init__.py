"""Where bytes live: local disks and object stores."""
