"""Where in its data a loader is that accelerate has prepared, and which random numbers went into its batches.

Such loaders read one batch ahead of the training. A resumed run has to account for that batch.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.state import RNG

Generators = dict[str, Any]
"""The generators of the CPU, as `holdfast.RNG` writes them."""


class Draws:
    """The random generators of this process as they were just before the last batch was fetched.

    Where batches are fetched by this process itself (``num_workers=0``), a dataset or collator draws from the same
    generators as the training, and the batch that was fetched ahead was drawn before the state was saved. `resume`
    lets it be drawn from what it was drawn from, and all that follows from the saved state. For Trainer, which makes
    a new loader to skip batches, and keeps of the old one what gives the indices.
    """

    def __init__(self) -> None:
        self._fetched = 0  # in this epoch
        self._before: Any = None  # the generators before the last of them; None where nothing was fetched ahead
        self._again: tuple[int, Generators] | None = None
        self._then: Generators = {}
        self.restored = False

    def watch(self, loader: Any) -> Any:
        """Listen to the batches that a prepared ``loader`` fetches; returns it."""
        if getattr(loader, "batch_sampler", None) is not None and not getattr(loader, "num_workers", 0):
            _pass_through(loader.batch_sampler, self._batches)
        return loader

    def _batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        for number, indices in enumerate(inner):
            self._fetching(number)
            yield indices
        self._ended()

    def state_dict(self) -> dict[str, Any] | None:
        """What `resume` takes; None if nothing was fetched ahead."""
        if self._before is None:
            return None
        return {"fetched": self._fetched, "rng": _plain(self._before)}

    def resume(self, saved: dict[str, Any] | None, then: Generators) -> None:
        """Draw the batch that was fetched ahead from what it was drawn from, and all later ones from ``then``."""
        self._again = (saved["fetched"], saved["rng"]) if saved is not None else None
        self._then, self.restored = then, False

    def _fetching(self, number: int) -> None:
        if self._again is not None and number + 1 == self._again[0]:
            RNG().load_state_dict(self._again[1])
        elif self._again is not None and number + 1 > self._again[0]:
            self._go_on()
        if self._again is None or number + 1 == self._again[0]:
            self._fetched, self._before = number + 1, _generators()

    def _ended(self) -> None:
        self._before = None
        if self._again is not None:
            self._go_on()

    def _go_on(self) -> None:
        RNG().load_state_dict(self._then)
        self._again, self.restored = None, True


class Position:
    """How many batches of which epoch a prepared loader has given out; part of a state, by `holdfast.PerRank`.

    After a load the loader goes on there with its next iteration: batches that were given out are passed over, without
    being read unless the dataset is a stream. At the end of an epoch the next iteration gives none, so that what a
    script does after an epoch is done. On another number of ranks it goes on after as many samples. What accelerate
    made a ``StatefulDataLoader`` goes on from its own state instead, on the same number of ranks.
    """

    def __init__(self, loader: Any) -> None:
        # No cycle of references: a loader that is dropped ends its workers at once.
        self._loader = weakref.ref(loader)
        self._streams = isinstance(loader.dataset, torch.utils.data.IterableDataset)
        self._stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        self._here = not loader.num_workers  # whether this process fetches and collates
        self._epoch, self._fetched, self._ended = 0, 0, False
        self._before: Any = None  # the generators before the last fetch
        self._skip = 0
        self._resumed = False  # whether the epoch under way began before a load
        self._shuffles = None if self._streams else _generator_of(loader)
        self._order: bytes | None = None  # its state when the epoch began
        self._reading: Any = lambda: None
        self._resume: dict[str, Any] | None = None
        if not self._streams and loader.batch_sampler is not None:
            _pass_through(loader.batch_sampler, self._batches)
        # accelerate gets the inner loader's iterator by this attribute, so it may be set on the object.
        loader.base_dataloader.__iter__ = self._begin

    @classmethod
    def of(cls, loader: Any) -> Position:
        """The one position of a loader. Raises Unsupported if it is not one that can be resumed."""
        kind = next((base.__name__ for base in type(loader).__mro__ if hasattr(base, "__iter__")), "object")
        if kind != "DataLoaderShard":
            raise Unsupported(
                f"a {kind} cannot be resumed in the middle of an epoch: prepare the loader with "
                "DataLoaderConfiguration(dispatch_batches=False), or leave it out with loaders=False"
            )
        position = loader.__dict__.get("_holdfast_position")
        if position is None:
            position = loader.__dict__["_holdfast_position"] = cls(loader)
        return position  # type: ignore[no-any-return]

    @property
    def loader(self) -> Any:
        """The prepared loader."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this state is gone: keep it for as long as its state is saved")
        return loader

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0, or the one that comes next."""
        return self._resume["epoch"] if self._resume is not None else int(self.loader.iteration)

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches given out, and what was drawn for the one fetched ahead."""
        if self._resume is not None:
            return self._resume
        under_way = self._reading() is not None and self.loader.iteration == self._epoch
        given = 0
        if under_way:
            given = self._fetched if self._ended else max(self._fetched - 1, 0)
        ended = under_way and self._ended
        order = self._order if given and not ended else _state_of(self._shuffles)
        return {
            "order": order, "epoch": int(self.loader.iteration), "given": given, "ended": ended,
            "draws": _plain(self._before) if self._here and given and not ended else None,
            "loader": self.loader.state_dict() if self._stateful and given and not ended else None,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there with the next iteration."""
        self._resume = state
        self.loader.iteration = state["epoch"]

    def elsewhere(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """What a rank of another number of ranks goes on with: as many samples further, as near as batches allow."""
        if states[0]["loader"] is not None:
            raise Mismatch(
                f"a StatefulDataLoader was saved by {len(states)} ranks in the middle of an epoch, and cannot go on on "
                f"{world_size}: use accelerate's ordinary loaders, or leave the loader out by only="
            )
        given = states[0]["given"]
        if not getattr(self.loader.batch_sampler, "split_batches", False):
            given = given * len(states) // world_size
        return {**states[0], "given": given, "draws": None}

    def _begin(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        self._epoch, self._fetched, self._ended = int(self.loader.iteration), 0, False
        self._resumed = resume is not None
        if resume is not None and resume["order"] is not None and self._shuffles is not None:
            self._shuffles.set_state(torch.frombuffer(bytearray(resume["order"]), dtype=torch.uint8))
        self._order = _state_of(self._shuffles)
        if resume is None:
            reading = _Reading(self, self._iterate(), None)
        else:
            now = RNG().state_dict()
            inner = self._after(resume)
            reading = _Reading(self, iter(()) if resume["ended"] else inner, resume["draws"])
            self._fetched = resume["given"]
            RNG().load_state_dict(now)  # what shuffles and seeds workers was drawn when the epoch began
        self._reading = weakref.ref(reading)
        return reading

    def _iterate(self) -> Iterator[Any]:
        inside = self.loader.base_dataloader
        return type(inside).__iter__(inside)  # type: ignore[no-any-return]

    def _after(self, resume: dict[str, Any]) -> Iterator[Any]:
        if resume["loader"] is not None:
            self.loader.load_state_dict(resume["loader"])
            return self._iterate()
        self._skip = resume["given"]
        inner = self._iterate()
        self._skip = 0
        if self._streams and not resume["ended"]:
            for _ in range(resume["given"]):
                next(inner, None)
        return inner

    def _batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        return islice(inner, self._skip, None)

    def _stopped(self, *, empty: bool) -> None:
        self._ended = True
        if empty and self._resumed:
            self.loader.iteration += 1  # accelerate counts an epoch only if it gives a batch


class _Reading:
    """An iterator that tells its `Position` what it gives, and draws its first batch ``again`` as it was drawn."""

    def __init__(self, position: Position, inner: Iterator[Any], again: Generators | None) -> None:
        self._position, self._inner, self._again, self._empty = position, inner, again, True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        again, self._again = self._again, None
        now = RNG().state_dict() if again is not None else {}
        if again is not None:
            RNG().load_state_dict(again)
        if self._position._here:
            self._position._before = _generators()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._position._stopped(empty=self._empty)
            raise
        finally:
            if again is not None:
                RNG().load_state_dict(now)
        self._empty = False
        self._position._fetched += 1
        return batch


def _pass_through(sampler: Any, change: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Let what ``sampler`` yields go through ``change``.

    By a subclass made for this one object: accelerate looks into samplers, and a wrapper would hide what it seeks.
    """
    kind = type(sampler)
    sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": lambda this: change(kind.__iter__(this))})


def _generator_of(loader: Any) -> torch.Generator | None:
    """What a loader is shuffled by: a sampler that draws from the program's own generator gets one for itself."""
    inner = loader.batch_sampler
    while hasattr(inner, "batch_sampler"):  # a shard of one
        inner = inner.batch_sampler
    sampler = getattr(inner, "sampler", None)
    if not isinstance(sampler, torch.utils.data.RandomSampler) or hasattr(sampler, "initial_seed"):
        return None  # accelerate's seedable sampler needs its epoch alone
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(torch.initial_seed())
    return cast("torch.Generator", sampler.generator)


def _state_of(generator: torch.Generator | None) -> bytes | None:
    return bytes(generator.get_state().tolist()) if generator is not None else None


def _generators() -> tuple[Any, ...]:
    """Copies of the generators of the CPU, as quick as can be: this is done for each batch."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None


def _plain(generators: tuple[Any, ...]) -> Generators:
    (version, words, gauss), cpu, of_numpy = generators
    state: Generators = {"python": [version, list(words), gauss], "torch": bytes(cpu.tolist())}
    if of_numpy is not None:
        kind, keys, position, has_gauss, cached = of_numpy
        state["numpy"] = [kind, keys.tobytes(), int(position), int(has_gauss), float(cached)]
    return state
