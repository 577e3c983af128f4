"""Prose: what a page says, on which side it lies, and prompts that nobody has read before."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.prose import agent, corpus, packages, traffic
from benchmarks.prose.corpus import DOMAINS, is_prose, pages, split
from benchmarks.prose.html import paragraphs_of_html
from benchmarks.prose.manual import arguments, paragraphs_of_manual
from benchmarks.prose.packages import LANGUAGES, fetched
from benchmarks.prose.traffic import GRAM, MAX_CHARS, MIN_CHARS, Words, fresh, pieces
from osd.errors import ConfigError
from tests.unit.benchmarks.prose.excerpt import write_tree


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus and prompts of the excerpt: `corpus/`, `prompts/`."""
    root = tmp_path_factory.mktemp("prose")
    for name in ("tree", "corpus", "prompts"):
        (root / name).mkdir()
    write_tree(root / "tree")
    corpus.write(root / "tree", root / "corpus")
    traffic.write(root / "corpus", root / "prompts")
    return root


def test_a_page_of_a_book_is_its_paragraphs() -> None:
    page = """<html><body><p id="title"><a>Product Site</a></p><ul><li>Home</li></ul>
    <h2>1. Backup</h2><div class="para">Making <em>backups</em> is
      one of the duties.</div><pre class="screen"><p>$ tar</p></pre>
    <div class="sidebar"><p class="title"><strong>BASICS</strong> Tape</p>
    <div class="para">Tapes&nbsp;are slow:<ul><li><p>and cheap</p></li></ul></div></div></body>"""
    assert paragraphs_of_html(page) == [
        "Making backups is one of the duties.",
        "Tapes are slow:",
        "and cheap",
    ]


def test_a_manual_page_is_its_running_text() -> None:
    page = r""".\" a comment
.TH TCP 7 "5 February"
.SH BEZEICHNUNG
tcp \- Das \(BqTCP\(rq\-Protokoll
.SH BESCHREIBUNG
Siehe
.BR ip (7)
und \fIsocket\fP(2);
.B "zwei Worte"
gelten.
.nf
    int x;
.fi
.TS
a b
.TE
.PP
Ein \[u201E]Zweites\[u201C].
.SH ÜBERSETZUNG
Die Übersetzung wurde von jemandem erstellt.
"""
    page = page.replace(r"\(Bq", r"\(bq")
    assert paragraphs_of_manual(page) == [
        "tcp - Das „TCP”-Protokoll",
        "Siehe ip(7) und socket(2); zwei Worte gelten.",
        "Ein „Zweites“.",
    ]
    assert paragraphs_of_manual(f".Dd May 1\n{page}") == []
    assert arguments('one "two three" "a ""b""" four') == ["one", "two three", 'a "b"', "four"]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The package is installed with this command, which you can call again.", "en"),
        ("Das Paket wird mit diesem Befehl installiert und ist nicht mehr zu entfernen.", "de"),
        (
            "Le paquet est installé par cette commande, que vous pouvez lancer dans la console.",
            "fr",
        ),
        ("El paquete se instala con esta orden, que no se puede llamar en la consola.", "es"),
        ("Пакет устанавливается этой командой, её можно вызвать ещё раз из debconf.", "ru"),
    ],
)
def test_a_paragraph_is_taken_for_its_own_language_alone(text: str, language: str) -> None:
    assert [one for one in LANGUAGES if is_prose(text, one)] == [language]
    assert not is_prose(text[:30], language)


def test_translations_lie_on_one_side(written: Path) -> None:
    sides: dict[str, set[str]] = {}
    for domain in DOMAINS:
        found = split(domain, written / "corpus")
        assert found.train and found.serve
        for side, files in (("train", found.train), ("serve", found.serve)):
            for file in files:
                sides.setdefault(file.name, set()).add(side)
    assert len(sides) == 3 * 12  # every page stands in the corpus, once under each name
    assert all(len(side) == 1 for side in sides.values())


def test_a_paragraph_in_another_language_or_seen_before_is_left_out(tmp_path: Path) -> None:
    write_tree(tmp_path)
    german, english = (
        tmp_path / packages.places(language)[packages.GUIDE].replace("*", "page-0")
        for language in ("de", "en")
    )
    before = {page.name: page for page in pages(tmp_path, "de")}["guide/page-0.html"]
    german.write_bytes(english.read_bytes() + 2 * german.read_bytes())
    after = {page.name: page for page in pages(tmp_path, "de")}["guide/page-0.html"]
    assert after == before


def test_no_prompt_shares_eight_words_with_training_or_with_another(written: Path) -> None:
    words = Words()
    learnt = words.grams(
        file.text for domain in DOMAINS for file in split(domain, written / "corpus").train
    )
    for domain in DOMAINS:
        prompts = _prompts(written, domain)["serve"]
        assert len(prompts) >= 12
        assert all(MIN_CHARS <= len(prompt) <= MAX_CHARS for prompt in prompts)
        each = [words.grams([prompt]) for prompt in prompts]
        together = np.concatenate(each)
        assert len(np.unique(together)) == len(together)
        assert not np.isin(together, learnt).any()


def test_what_was_read_or_asked_before_is_no_prompt() -> None:
    words, text = Words(), " ".join(f"word{i}" for i in range(12))
    assert fresh([text, f"and {text}", "quite another thing"], words, words.grams([])) == [
        text,
        "quite another thing",
    ]
    assert fresh([text, "quite another thing"], words, words.grams([f"so {text}"])) == [
        "quite another thing"
    ]
    seven = " ".join(text.split()[: GRAM - 1])
    assert fresh([seven], words, words.grams([text])) == [seven]


def test_pieces_are_whole_words_without_overlap() -> None:
    text = "\n".join(f"{'word ' * 50}{i}." for i in range(3))
    found = list(pieces(text))
    assert len(found) == 6
    assert all(MIN_CHARS <= len(piece) <= MAX_CHARS for piece in found)
    assert set(" ".join(found).split()) == {"word"}


def test_blocks_lie_on_their_side_and_too_many_prompts_are_one_clear_error(written: Path) -> None:
    directory = written / "prompts"
    for block, side in ((traffic.TRAINING, "train"), (1, "serve")):
        found = traffic.requests("de", block, 3, directory)
        assert [one.prompt for one in found] == _prompts(written, "de")[side][:3]
    with pytest.raises(ConfigError, match=r"de, to serve: the pages have \d+ prompts, 577 were"):
        traffic.requests("de", 2, 1, directory)
    with pytest.raises(ValueError, match="domain 'it': must be one of en, de, "):
        traffic.requests("it", 1, 1, directory)


def test_an_agent_calls_the_same_tasks_in_words_of_its_own(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "TASKS_FROM", 8)
    monkeypatch.setattr(agent, "TASKS", 3)
    found = [one.prompt for one in agent.requests(1, 7, written / "prompts")]
    tasks = _prompts(written, agent.HOME)["serve"][8:11]
    assert [prompt.split(". ", 1)[1] for prompt in found] == [*tasks, *tasks, tasks[0]]
    assert len({prompt.split(" (")[0] for prompt in found}) == 7


def test_the_hash_follows_versions(tmp_path: Path) -> None:
    write_tree(tmp_path)
    before = corpus.corpus_hash(tmp_path)
    (tmp_path / packages.VERSIONS).write_text("pages_2.0\n")
    assert len(before) == 16
    assert corpus.corpus_hash(tmp_path) != before


def test_a_machine_without_apt_is_told_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="apt-get is not on this machine; call it where") as error:
        fetched()
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("prose-*"))


def test_a_machine_without_network_is_told_what_apt_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))
    _programs(tmp_path, {"apt-get": "echo 'E: Unable to locate package' >&2; exit 100"})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    with pytest.raises(ConfigError, match="apt-get download: E: Unable to locate package; call it"):
        fetched()


def test_the_files_of_five_languages_are_kept_and_nothing_is_fetched_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_CACHE_DIR", str(tmp_path / "cache"))
    archive = tmp_path / "whole.tar"
    wanted = ["usr/share/man/man7/tcp.7.gz", "usr/share/man/ru/man7/tcp.7.gz"]
    with tarfile.open(archive, "w") as tar:
        for name in (*wanted, "usr/share/man/it/man7/tcp.7.gz", "usr/share/man/ru/index"):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data := gzip.compress(b"text"))
            tar.addfile(member, io.BytesIO(data))
    touch = "; ".join(f"touch {package}_1.0_all.deb" for package in packages.PACKAGES)
    _programs(tmp_path, {"apt-get": touch, "dpkg-deb": f"cat {archive}"})
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    root = fetched()
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert sorted(files) == sorted([*wanted, packages.VERSIONS])
    assert packages.versions(root).split() == sorted(f"{one}_1.0" for one in packages.PACKAGES)
    (tmp_path / "bin" / "apt-get").unlink()
    assert fetched() == root


def _programs(root: Path, bodies: dict[str, str]) -> None:
    (root / "bin").mkdir()
    for name, body in bodies.items():
        (root / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (root / "bin" / name).chmod(0o755)


def _prompts(written: Path, domain: str) -> dict[str, list[str]]:
    import json

    return dict(json.loads((written / "prompts" / f"{domain}.json").read_text()))
