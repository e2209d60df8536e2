"""Files of the cache folder: nothing is lost where several write, and no reader sees a half."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastattn import cache_file


@pytest.fixture(autouse=True)
def _folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_writers_that_come_together_lose_nothing():
    """Each reads the file, and replaces it when all others have begun."""
    names = [str(n) for n in range(4)]
    begun = threading.Semaphore(0)

    def write(name):
        def changed():
            begun.release()
            known = cache_file.read("a.json") if cache_file.path("a.json").exists() else {}
            alone.wait(0.2)  # a writer without the lock reads meanwhile
            return known | {name: 1}

        cache_file.update("a.json", changed)

    alone = threading.Event()  # never set
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(write, names))
    assert sorted(cache_file.read("a.json")) == names


def test_a_change_that_fails_leaves_the_file_and_the_lock():
    cache_file.update("a.json", lambda: [1])
    with pytest.raises(ZeroDivisionError):
        cache_file.update("a.json", lambda: 1 / 0)
    assert cache_file.read("a.json") == [1]
    file = cache_file.update("a.json", lambda: [2])
    assert cache_file.read("a.json") == [2]
    assert os.listdir(file.parent) == [file.name]


def test_a_file_that_cannot_be_replaced_leaves_no_draft():
    cache_file.path("a.json").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        cache_file.update("a.json", lambda: [1])
    assert os.listdir(cache_file.path("a.json").parent) == ["a.json"]


def test_no_home_folder_is_no_file(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache_file.Path, "home", no_home)
    for call in (lambda: cache_file.read("a.json"), lambda: cache_file.update("a.json", dict)):
        with pytest.raises(FileNotFoundError, match=r"home directory.*XDG_CACHE_HOME is not set"):
            call()
