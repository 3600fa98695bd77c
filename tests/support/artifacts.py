"""What MLflow holds of a run's files, wherever it keeps them."""

import tempfile
from pathlib import Path
from typing import Any

from specexp.tracking import results
from specexp.tracking.mlflow_store import Backend, artifacts_of


def digests(backend: Backend, run: Any) -> dict[str, str]:
    """Path -> SHA-256 of a run's artifacts."""
    if folder := artifacts_of(backend, run.info.artifact_uri):
        return _digests(folder) if folder.exists() else {}
    with tempfile.TemporaryDirectory() as temporary, backend.reaching():
        if backend.client.list_artifacts(run.info.run_id):
            backend.client.download_artifacts(run.info.run_id, "", temporary)
        return _digests(Path(temporary))


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): results.digest(path.read_bytes())
        for path in results.files_in(folder)
    }
