"""pip's settings of one machine, as a build elsewhere gets them; and what a build installs."""

from pathlib import Path

import pytest

from tools.pip_settings import parse_settings, paths_in
from tools.requirements import requirements


def test_variables_win_and_lists_fit_a_line() -> None:
    listed = "global.index-url='https://a/simple'\nglobal.find-links='\\n/w\\n/v'\n:env:.index-url='https://b'\nfreeze.all='x'\n"
    assert parse_settings(listed) == {"index-url": "https://b", "find-links": "/w /v"}


def test_local_files_are_mounted_once_and_an_index_with_its_files() -> None:
    settings = {"find-links": "/w /w/more", "extra-index-url": "file:///pypi/simple https://a/simple", "cert": "/c.pem"}
    assert paths_in(settings) == [Path("/c.pem"), Path("/pypi"), Path("/w")]


def test_requirements_of_the_project_or_of_an_extra() -> None:
    text = '[project]\ndependencies = ["a>=1", "b"]\n[project.optional-dependencies]\nworker = ["c; x == \'y\'"]\n'
    assert requirements(text, []) == ["a>=1", "b"]
    assert requirements(text, ["worker"]) == ["c; x == 'y'"]
    with pytest.raises(KeyError):
        requirements(text, ["missing"])
