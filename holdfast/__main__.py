"""``python -m holdfast``: the command, where its script is not on the path.

Run by Python. Never imported.
"""

from holdfast.cli.app import main

if __name__ == "__main__":
    main()
