"""Containers that formats share: pickles, zips, tars, YAML, torch files; nothing is executed."""
