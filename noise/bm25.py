"""A BM25 index over passages, kept on disk for the next run."""

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What the scores depend on besides the texts. Lucene's formula, k1 and b, and bm25s' English stop words; no stemmer.
SETTINGS = {"format": 1, "method": "lucene", "k1": 1.5, "b": 0.75, "stopwords": "english"}


class BM25Index:
    """BM25 scores of a fixed list of texts, by bm25s.

    It is read from the cache, or built and written there, when the first score is asked for or by `load`. Pickled without
    it: every process reads the cache.

    Args:
        texts: The passages.
        cache_dir: Where indices are kept, each in a folder named by a hash of its texts and settings. Default
            `bft_hf/bm25` in the Hugging Face home (`HF_HOME`).
        progress: Show progress while the index is built.
    """

    def __init__(self, texts: Sequence[str], *, cache_dir: str | Path | None = None, progress: bool = True) -> None:
        if not texts:
            raise ValueError("there is no passage to index")
        self.texts = tuple(texts)
        self.cache_dir = default_cache() if cache_dir is None else Path(cache_dir)
        self.progress = progress
        self._index: Any = None
        self._places: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None, "_places": {}}

    @property
    def folder(self) -> Path:
        """Where this index is cached."""
        digest = hashlib.blake2b(repr(sorted(SETTINGS.items())).encode(), digest_size=16)
        for text in self.texts:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
        return self.cache_dir / digest.hexdigest()

    def load(self) -> Any:
        """The bm25s index itself."""
        if self._index is None:
            folder = self.folder
            self._index = _read(folder, len(self.texts)) or self._build(folder)
        return self._index

    def scores(self, question: str) -> np.ndarray:
        """Score every passage for a question.

        Returns:
            (passage,) float32, 0 where no word is shared.
        """
        import bm25s

        words = bm25s.tokenize([question], stopwords=SETTINGS["stopwords"], return_ids=False, show_progress=False)[0]
        index = self.load()
        known = [word for word in words if word in index.vocab_dict]
        if not known:
            return np.zeros(len(self.texts), dtype=np.float32)
        return index.get_scores(known)

    def scores_of(self, question: str, texts: Sequence[str]) -> list[float]:
        """Score some of the passages for a question, given as they were indexed."""
        if not self._places:
            self._places = {text: place for place, text in enumerate(self.texts)}
        scores = self.scores(question)
        return [float(scores[self._places[text]]) for text in texts]

    def _build(self, folder: Path) -> Any:
        import bm25s

        tokens = bm25s.tokenize(list(self.texts), stopwords=SETTINGS["stopwords"], show_progress=self.progress)
        index = bm25s.BM25(method=SETTINGS["method"], k1=SETTINGS["k1"], b=SETTINGS["b"])
        index.index(tokens, show_progress=self.progress)
        try:
            _write(index, folder)
        except OSError as error:
            warnings.warn(f"the BM25 index is not kept for the next run: {error}", stacklevel=2)
        return index


def _write(index: Any, folder: Path) -> None:
    """Save beside and move: a run that is killed leaves no half index, and two runs at once do not meet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
    try:
        index.save(beside)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(beside, folder)
    except OSError:
        if not folder.is_dir():  # it is there where another run was faster
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def default_cache() -> Path:
    """`bft_hf/bm25` in the Hugging Face home."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "bft_hf" / "bm25"


def _read(folder: Path, count: int) -> Any:
    """The index in a folder; None if there is none, or what there is cannot be read."""
    import bm25s

    if not folder.is_dir():
        return None
    try:
        index = bm25s.BM25.load(str(folder), load_corpus=False)
    except Exception:  # a damaged file fails in numpy, in json or in bm25s itself; all of them are built anew
        return None
    return index if index.scores["num_docs"] == count else None
