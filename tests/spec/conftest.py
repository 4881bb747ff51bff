import pytest
import torch

from tests.spec.drafts import Pair, write_pairs


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models: threads only wait for each other."""
    torch.set_num_threads(1)
