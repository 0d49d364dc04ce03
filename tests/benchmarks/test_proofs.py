from pathlib import Path

from benchmarks.prove.run import OPTIMIZED, PARTS, ROOT, chosen_by, is_about


def test_a_commit_gets_one_part_and_those_of_what_changed():
    names = list(PARTS)
    assert chosen_by("0" * 40, lambda _: set()) == names[:1]
    assert chosen_by(f"{len(names) + 3:040x}", lambda _: set()) == [names[3]]
    assert chosen_by("0" * 40, lambda _: {"jax/layers.py"}) == [names[0], "jax"]
    assert {"conformance", "jax", "mlx"} <= set(chosen_by("0" * 40, lambda _: {"core/arrays/cast.py"}))
    assert chosen_by("0" * 40, lambda name: {"jax/layers.py"} if name == "mlx" else set()) == names[:1]


def test_every_folder_of_the_package_and_every_test_marked_prove_is_in_a_part():
    folders = {path.parent.relative_to(ROOT / "halfstep").parts[0] for path in (ROOT / "halfstep").glob("*/*.py")}
    assert [f for f in folders if not any(is_about(part, f"{f}/x.py") for part in PARTS.values())] == []
    named = {
        Path(word) for part in PARTS.values() for words in part.commands for word in words if "tests/" in word
    }
    marked = [p.relative_to(ROOT) for p in ROOT.glob("tests/**/*.py") if "mark.prove" in p.read_text("utf-8")]
    assert [p for p in marked if not named & {p, *p.parents}] == []


def test_what_a_part_names_exists():
    for part in PARTS.values():
        assert all((ROOT / "halfstep" / place).exists() for place in part.proves), part.proves
        named = [word for words in part.commands for word in words if word.startswith(("tests/", "benchmarks/"))]
        assert all((ROOT / word).exists() for word in named), named
    assert all((ROOT / name).exists() for name in OPTIMIZED)
