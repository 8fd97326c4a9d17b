"""Other projects' own checkpoint tests, run with holdfast in the place of torch's engine.

Their tests and sources stay outside of this project. You give a folder of checkouts, and the table is printed:

    make outside SRC=folder

| in the folder | from | commit |
|---|---|---|
| `torchtitan` | pytorch/torchtitan on GitHub | `b5bcd76c66d0acb1a08b176d9639425bc55e0b2a` (2026-08-21) |
| `pytorch-lightning` | Lightning-AI/pytorch-lightning | `7f0c3436cd3f6ad3753125672024fc415cbcb414` (2026-07-20) |

Each suite runs twice: as it is, and with its shim, a pytest plugin of this package that puts holdfast in torch's place.
A suite whose checkout or packages are missing is named and left out. To add one, write its shim and add a line to
`SUITES` in `tests/outside/suites.py`. What a suite imports and torch does not bring goes into `requirements.txt` here.

torchtitan's trainer also runs for real here, on two gloo ranks of the CPU, killed and resumed (`resume_titan.py`).

Nothing here is collected by pytest.
"""
