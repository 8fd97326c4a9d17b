"""MosaicML Composer."""
