"""Patterns and tables of names: what fits, what fits nothing, and what errors say of it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.ondisk import names
from holdfast.ondisk.patterns import asked_in_target, check_rename, matcher, renamer, selector, unfit, unfit_in_load

_keys = st.text("ab.", min_size=1, max_size=2)
_names = st.lists(_keys, min_size=1, max_size=3).map("/".join)
_patterns = st.one_of(
    _names, st.builds("{}/".format, _names), st.lists(st.sampled_from("ab/.*?["), min_size=1, max_size=6).map("".join)
)


def _fits(name: str, pattern: str, known: list[str]) -> bool:
    """What the documentation says of one pattern."""
    return pattern == "*" or _begins(name, pattern, known) or fnmatchcase(name, pattern)


def _begins(name: str, beginning: str, known: list[str]) -> bool:
    bare = beginning.rstrip("/")
    if not bare or names.under(name, bare):
        return bool(bare)
    dotted = bare if bare.endswith(".") else bare + "."
    is_path = beginning != bare or any(names.under(other, bare) for other in known)
    return name.startswith(dotted) and not is_path


@given(st.lists(_patterns, min_size=1, max_size=4), st.lists(_names, max_size=8))
def test_a_name_fits_by_itself_by_a_path_above_it_or_by_a_glob(only: list[str], known: list[str]) -> None:
    fits = matcher(only, known=known)
    assert [fits(name) for name in known] == [any(_fits(name, pattern, known) for pattern in only) for name in known]
    odd = [p for p in dict.fromkeys(only) if p != "*" and not any(_fits(name, p, known) for name in known)]
    assert unfit(only, known) == odd
    if odd:
        with pytest.raises(holdfast.errors.Mismatch) as caught:
            selector(only, known, "here")
        assert all(repr(pattern) in str(caught.value) for pattern in odd)
    else:
        assert [selector(only, known, "here")(name) for name in known] == [fits(name) for name in known]


def test_everything_fits_nothing() -> None:
    assert unfit(["*"], []) == [] and unfit(["*", "model"], []) == ["model"]


@given(
    st.lists(_names, max_size=8, unique=True), st.lists(_patterns, min_size=1, max_size=3),
    st.dictionaries(_names, st.one_of(_names, st.just("")), max_size=3),
)  # fmt: skip
def test_a_target_asks_for_what_is_saved_of_its_names(
    saved: list[str], only: list[str], table: dict[str, str]
) -> None:  # fmt: skip
    """A table and the same as a function ask for the same of what is there, whatever it is renamed to."""
    rename, fits = renamer(table, saved), matcher(only, known=saved)
    renamed = {name: rename(name) for name in saved}
    if len(set(renamed.values())) < len(renamed):
        return  # a load refuses that
    for given_as in (table, rename):
        asked = asked_in_target(only, given_as, renamed)
        for name, own in renamed.items():
            above = callable(given_as) and any(other != own and names.under(other, own) for other in renamed.values())
            assert asked(own) == fits(name) or above


def test_what_only_the_target_has_goes_by_the_name_that_it_would_be_saved_under() -> None:
    renamed = {"model/w": "net/w", "step": "step"}
    asked = asked_in_target("model", {"model": "net"}, renamed)
    assert asked("net/new") and asked("net") and not asked("other/new") and not asked("step")
    asked = asked_in_target("net", {"model": "net"}, renamed)
    assert not asked("net/w") and not asked("net/new")
    asked = asked_in_target("model", {"model": ""}, {"model/w": "w", "step": "step"})
    assert asked("w") and asked("new") and not asked("step")
    asked = asked_in_target("model", lambda name: name.replace("model", "net"), {"model/w": "net/w", "c/lr": "c/lr"})
    assert asked("net") and asked("net/new") and asked("other"), "a function cannot tell: better missed than left out"
    assert not asked("c") and not asked("c/lr")


def test_a_pattern_may_wait_for_what_only_the_target_has() -> None:
    renamed = {"model/w": "net/w"}
    own = ["net", "net/w", "net/new", "ema/w"]
    table = {"model": "net"}
    assert unfit_in_load(["model/w", "model/new", "ema"], table, renamed, own) == ({}, ["model/new", "ema"])
    told, awaited = unfit_in_load(["net", "net/new", "modle", "ema"], table, renamed, own)
    assert awaited == ["ema"] and list(told) == ["net", "net/new", "modle"]
    assert told["net"] == "'net' (only= takes names as they were saved, and net/w was saved as model/w)"
    assert told["modle"] == "'modle' (did you mean model?)"
    assert unfit_in_load("ema", renamer(table), renamed, own)[1] == [], "a function cannot tell what it would be called"


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("modle", "model"), ("modle/*", "model"), ("model/layer.0.weight", "model/layers.0.weight"),
        ("model/layer.*.weight", "model/layers.0.weight"), ("layers.0.weight", "model/layers.0.weight"),
        ("model/layrs*", "model/layers"), ("optimizer/stat", "optimizer/state"), ("x", None),
    ],
)  # fmt: skip
def test_what_fits_nothing_is_told_with_a_near_name(pattern: str, hint: str | None) -> None:
    known = ["model/layers.0.weight", "optimizer/state/layers.0.weight/exp_avg", "step"]
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        selector(["model", pattern], known, "/ckpt")
    meant = f" (did you mean {hint}?)" if hint else ""
    assert str(caught.value) == f"/ckpt has nothing that fits only={pattern!r}{meant}"


def test_sections_are_near_among_very_many_names_too() -> None:
    known = [f"model/layers.{i}" for i in range(5000)]
    with pytest.raises(holdfast.errors.Mismatch, match=r"'modle' \(did you mean model\?\)"):
        selector("modle", known, "here")
    with pytest.raises(holdfast.errors.Mismatch, match=r"'modle/block\*' \(did you mean model\?\)"):
        selector("modle/block*", known, "here")
    with pytest.raises(holdfast.errors.Mismatch, match=r"'model/block\*'$"):
        selector("model/block*", known, "here")


def test_what_cannot_be_a_pattern() -> None:
    for empty in ("", [], (), None):
        with pytest.raises(
            holdfast.errors.Mismatch, match=rf"only={re.escape(repr(empty))} names nothing: leave it out"
        ):
            selector(empty, ["model"], "here")  # type: ignore[arg-type]
    with pytest.raises(holdfast.errors.Mismatch, match=r"only=\['model', ''\] has an empty name in it: leave it out"):
        selector(["model", ""], ["model"], "here")
    with pytest.raises(holdfast.errors.Mismatch, match=r"'/'"):
        selector("/", ["model"], "here")
    with pytest.raises(
        holdfast.errors.Mismatch, match=r"'!model' \(it cannot say what is left out: name what is wanted\)"
    ):
        selector(["*", "!model"], ["model"], "here")
    with pytest.raises(ValueError, match="nothing that fits"):  # a Mismatch is one
        selector("x", ["model"], "here")


def test_every_name_of_a_table_has_to_be_there() -> None:
    known = ["model/layers.0.weight", "step"]
    check_rename({"model/": "net", "model/layers.0.weight": "x", "step": "n"}, known, "here")
    check_rename(lambda name: "x", known, "here")
    check_rename(None, [], "here")
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        check_rename({"modle": "net", "model": "net", "": "x", "mod": "y"}, known, "/ckpt")
    assert str(caught.value) == (
        "rename= maps 'modle' (did you mean model?), '', 'mod' (did you mean model?), but no name of /ckpt is that or "
        "lies below it: the names are as in 'model/layers.0.weight'"
    )
    check_rename({"layers.0": "blocks.0"}, ["layers.0.weight"], "here")
    known = ["model/old.prefix.w", "model/head", "step"]
    for asked, meant in (("old.prefix", "model/old.prefix"), ("old", "model/old"), ("net/step", "step")):
        with pytest.raises(holdfast.errors.Mismatch, match=rf"'{asked}' \(did you mean {meant}\?\)"):
            check_rename({asked: "new"}, known, "/ckpt")
    for asked in ("model.old.prefix", "model/old.prefix"):  # of a conversion for Hugging Face, whose names are bare
        with pytest.raises(holdfast.errors.Mismatch, match=r"prefix' \(did you mean old.prefix\?\)"):
            check_rename({asked: "new"}, ["old.prefix.w", "head"], "/ckpt")
    with pytest.raises(holdfast.errors.Mismatch, match=r"'layer.0' \(did you mean layers.0\?\)"):
        check_rename({"layer.0": "blocks.0"}, ["layers.0.weight"], "here")


def test_a_table_maps_names_and_leading_paths_the_longest_first() -> None:
    table = renamer({"a": "x", "a/b": "y", "c/d/": "z/", "e": ""})
    told = [table(name) for name in ("a", "a/c", "a/b", "a/b/c", "ab", "c/d/e", "e/f")]
    assert told == ["x", "x/c", "y", "y/c", "ab", "z/e", "f"]
    dotted = renamer({"layers.1": "blocks.1"}, ["layers.1.w", "layers.10.w"])
    assert dotted("layers.1.w") == "blocks.1.w" and dotted("layers.10.w") == "layers.10.w"
    assert renamer(None)("a") == "a" and renamer(str.upper)("a") == "A"


_submodules = st.text("a01", min_size=1, max_size=2)
_parameters = st.builds("{}.{}".format, _submodules, st.sampled_from(["weight", "bias", "norm.scale"]))


@given(st.lists(_parameters, min_size=1, max_size=6, unique=True), st.data())
def test_a_submodule_is_the_beginning_of_its_parameters_and_of_their_state(
    parameters: list[str], data: st.DataObject
) -> None:
    """Of a module and of its optimizer: all that is below the submodule, and nothing of one whose name is longer."""
    head = data.draw(st.sampled_from(parameters)).partition(".")[0]
    for path, rest in (("model", ""), ("optimizer/state", "/exp_avg")):
        known = [f"{path}/{parameter}{rest}" for parameter in parameters]
        inside = [parameter.partition(".")[0] == head for parameter in parameters]
        for beginning, new in ((f"{path}/{head}", f"{path}/fc"), (f"{path}/{head}.", f"{path}/fc.")):
            assert unfit(beginning, known) == []
            assert list(map(selector(beginning, known, "here"), known)) == inside
            check_rename({beginning: new}, known, "here")
            named = [f"{path}/fc{p.removeprefix(head)}{rest}" for p in parameters]
            told = [own if moved else name for own, name, moved in zip(named, known, inside, strict=True)]
            assert list(map(renamer({beginning: new}, known), known)) == told


def test_a_path_is_no_beginning_up_to_a_point() -> None:
    """A section, a key or a value whose name is longer stays what it is: only what is no path may end at a point."""
    known = ["model/w", "model.ema/w", "step", "step.total", "odd./w"]
    for pattern, fitting in (("model", ["model/w"]), ("step", ["step"]), ("step/", ["step"]), ("odd.", ["odd./w"])):
        assert list(filter(matcher(pattern, known=known), known)) == fitting
        rename = renamer({pattern: "x"}, known)
        assert [name for name in known if rename(name) != name] == fitting
    table = renamer({"model/0": "model/fc", "model/0.w": "model/first"}, ["model/0.w", "model/0.b", "model/00.b"])
    assert [table(f"model/{name}") for name in ("0.w", "0.b", "00.b")] == ["model/first", "model/fc.b", "model/00.b"]
    assert unfit(["model/1", "model/10/"], ["model/10.weight"]) == ["model/1", "model/10/"]
    assert list(filter(matcher("model/1*", known=["model/10.w"]), ["model/10.w", "a"])) == ["model/10.w"]


def test_the_end_is_replaced_too_if_both_sides_of_a_table_give_one() -> None:
    known = ["model/module.0.w", "ema/w"]
    assert renamer({"model/module.": "model/"}, known)("model/module.0.w") == "model/0.w"
    assert renamer({"model/module": "model"}, known)("model/module.0.w") == "model.0.w"
    assert renamer({"ema/": "model/ema."}, known)("ema/w") == "model/ema.w"
    assert renamer({"model/module.": ""}, known)("model/module.0.w") == "0.w"
    asked = asked_in_target("model/0", {"model/0": "net/fc"}, {"model/0.w": "net/fc.w"})
    assert asked("net/fc.w") and asked("net/fc.new") and not asked("net/fcc.new")
