"""Who writes and who reads which box: pure functions of names, boxes and holders."""
