"""The structure can be seen at a glance: few rooms, no circles, small files and functions."""

from __future__ import annotations

import statistics
from graphlib import CycleError

import grimp
import pytest

from tests import figures
from tests.support.paths import ROOT

MAX_ROOMS, MAX_LAYERS = 21, 10
MAX_MODULES_OF_A_FOLDER = 18
MAX_LINES_OF_A_MODULE = 350
MAX_MEDIAN_OF_A_FUNCTION = 8


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return figures.import_graph()


def test_there_are_few_rooms(graph: grimp.ImportGraph) -> None:
    rooms = figures.rooms(graph)
    assert {"osd.records", "osd.control", "serving", "trainer", "buffers"} <= rooms
    assert len(rooms) <= MAX_ROOMS


def test_no_rooms_import_each_other(graph: grimp.ImportGraph) -> None:
    assert figures.circles(figures.arrows(graph)) == []


def test_there_are_few_layers(graph: grimp.ImportGraph) -> None:
    assert len(figures.layers(figures.rooms(graph), figures.arrows(graph))) <= MAX_LAYERS


def test_no_folder_holds_too_many_modules() -> None:
    counts = {folder: len(modules) for folder, modules in figures.folders().items()}
    assert {f: num for f, num in counts.items() if num > MAX_MODULES_OF_A_FOLDER} == {}


def test_no_module_is_too_long() -> None:
    lengths = {
        str(file.relative_to(ROOT)): figures.num_lines(file)
        for package in (*figures.PACKAGES, figures.LABORATORY)
        for file in figures.files(package)
    }
    assert {file: num for file, num in lengths.items() if num > MAX_LINES_OF_A_MODULE} == {}


def test_half_of_the_functions_are_short() -> None:
    lengths = [function.num_lines for function in figures.functions()]
    assert statistics.median(lengths) <= MAX_MEDIAN_OF_A_FUNCTION


def test_circles_are_found_and_have_no_layers() -> None:
    arrows = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "f"), ("f", "e"), ("g", "a")]
    assert figures.circles(arrows) == [{"a", "b", "c"}, {"e", "f"}]
    with pytest.raises(CycleError):
        figures.layers("abcdefg", arrows)


def test_layers_are_those_of_the_longest_chain() -> None:
    arrows = [("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")]
    assert figures.circles(arrows) == []
    assert figures.layers("abcde", arrows) == [{"c", "e"}, {"b", "d"}, {"a"}]
