"""examples/getting_started.ipynb runs from start to end in a kernel of its own, and the committed one has the outputs of such a run.

`python tests/test_notebook.py` runs it and writes the outputs into it.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
NOTEBOOK = REPOSITORY / "examples" / "getting_started.ipynb"
STORIES = REPOSITORY.parent / "shared" / "data" / "stories260K"
if not NOTEBOOK.is_file():
    pytest.skip("no examples/ beside tests/, as in the sdist", allow_module_level=True)
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def run(folder: Path, stories: Path) -> "nbformat.NotebookNode":
    """Run the notebook in a folder, with stories260K from another, and return it with its outputs."""
    from jupyter_client import KernelManager

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # This Python, whatever kernels are installed under the name python3.
    manager = KernelManager()
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=300, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    client.execute(env={**os.environ, **quiet, "TRANSFORMERS_VERBOSITY": "error", "STORIES260K": str(stories)})
    for cell in notebook.cells:  # what libraries say of other packages that are or are not installed
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def outputs(notebook: "nbformat.NotebookNode") -> list[tuple[str, str]]:
    """Of each code cell the kinds of its outputs and what they say, but for numbers and for Trainer's own lines, of any version."""
    said = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kinds = "+".join(sorted({output.output_type for output in cell.outputs}))
            text = "".join(output.get("text", "") for output in cell.outputs)
            text = re.sub(r"^\{'(loss|train_runtime)'.*\n?|^\s*\n", "", text, flags=re.MULTILINE)
            said.append((kinds, " ".join(re.sub(r"[-+]?[\d.]+(e-\d+)?", "#", text).split())))
    return said


def test_the_notebook_runs_and_has_the_outputs_of_its_run(tmp_path: Path) -> None:
    if not STORIES.is_dir():
        run(tmp_path, tmp_path / "none")
        return
    committed, now = (outputs(notebook) for notebook in (nbformat.read(NOTEBOOK, as_version=4), run(tmp_path, STORIES)))
    assert committed == now, f"python tests/test_notebook.py writes the outputs of today into {NOTEBOOK.name}"
    assert "Lily" in now[1][1] and "display_data" in now[4][0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), STORIES)
    for cell in result.cells:
        cell.metadata.pop("execution", None)  # when it ran
    nbformat.write(result, NOTEBOOK)
