"""Other projects' own checkpoint tests, run with holdfast in the place of torch's engine.

Their tests and sources stay outside of this project. You give a folder of checkouts, and the table is printed:

    make outside SRC=folder

| in the folder | from | commit |
|---|---|---|
| `torchtitan` | github.com/pytorch/torchtitan | `b5bcd76c66d0acb1a08b176d9639425bc55e0b2a` (2026-08-21) |
| `transformers` | github.com/huggingface/transformers | `22c22fa26f5f3352d243bc358f0947af05b1d61b` |
| `accelerate` | github.com/huggingface/accelerate | `16cb6eb80dd9aa8b4df1a63ef57863e455d53b83` (2026-07-24) |

Each suite runs twice: as it is, and with its shim, a pytest plugin of this package that puts holdfast in torch's place.
A suite whose checkout or packages are missing is named and left out. To add one, write its shim and add a line to
`SUITES` in `tests/outside/suites.py`. What a suite imports and torch does not bring goes into `requirements.txt` here.

torchtitan's trainer also runs for real here, on two gloo ranks of the CPU, killed and resumed (`resume_titan.py`). So
do the recipes of the documentation for OLMo-core, Composer and verl (`recipes.py`), where these are installed; alone
they run by `python -m tests.outside.recipes`.

Nothing here is collected by pytest.
"""
