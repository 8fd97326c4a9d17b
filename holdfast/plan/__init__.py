"""Which rank writes and reads which box: pure functions of names, boxes and holders."""
