"""A fast tier and a store behind it: uploads in the background, and a restart from whichever has the newest whole step.

The manager owns one `Tiers`. Never lets training wait for the store, nor loses what is committed on either tier.
"""
