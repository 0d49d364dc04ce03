from pathlib import Path

from benchmarks.prove.run import OPTIMIZED, PARTS, ROOT, Part, chosen_by, contents


def test_a_commit_gets_one_part_and_those_of_what_changed():
    names = list(PARTS)
    assert chosen_by("0" * 40, lambda _: False) == names[:1]
    assert chosen_by(f"{len(names) + 3:040x}", lambda _: False) == [names[3]]
    assert chosen_by("0" * 40, {"jax"}.__contains__) == [names[0], "jax"]


def test_what_a_part_is_about_is_known_by_its_committed_contents():
    part = Part(("core/split.py", "core"), ())
    assert contents(part) == contents(part)
    assert len(set(contents(part).values())) == 2


def test_every_folder_of_the_package_and_every_test_marked_prove_is_in_a_part():
    folders = {path.parent.relative_to(ROOT / "halfstep").parts[0] for path in (ROOT / "halfstep").glob("*/*.py")}
    assert folders - {place for part in PARTS.values() for place in part.proves} == set()
    named = {
        Path(word) for part in PARTS.values() for words in part.commands for word in words if word[:6] == "tests/"
    }
    marked = [p.relative_to(ROOT) for p in ROOT.glob("tests/**/*.py") if "mark.prove" in p.read_text("utf-8")]
    assert [p for p in marked if not named & {p, *p.parents}] == []
    words = {word for part in PARTS.values() for command in part.commands for word in command}
    left_out = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    assert left_out <= words, "what one part leaves out, another runs"


def test_what_a_part_names_exists():
    for part in PARTS.values():
        assert all((ROOT / "halfstep" / place).exists() for place in part.proves), part.proves
        named = [word for words in part.commands for word in words if word.startswith(("tests/", "benchmarks/"))]
        assert all((ROOT / word).exists() for word in named), named
    assert all((ROOT / name).exists() for name in OPTIMIZED)
