"""Containers that formats share: pickles, zips, tars, torch files; nothing is executed."""
