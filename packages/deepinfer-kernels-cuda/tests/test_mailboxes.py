from types import SimpleNamespace

import pytest
import torch
from deepinfer_kernels_cuda.mailboxes import mailbox


@pytest.fixture
def on_stream(monkeypatch):
    """Makes boxes in host memory as if on a stream of this number."""

    def call(stream: int, owner: str = "seam", words: int = 8, empty: int = -8531) -> torch.Tensor:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=stream))
        return mailbox(owner, torch.device("cpu"), words, dtype=torch.int32, empty=empty)

    return call


def test_a_box_begins_empty_and_stays_where_it_is(on_stream) -> None:
    box = on_stream(7)
    assert box.tolist() == [-8531] * 8
    box[3] = 5
    others = [on_stream(stream, words=words) for stream in range(300) for words in (8, 16)]
    again = on_stream(7)
    assert again.data_ptr() == box.data_ptr()
    assert again.tolist() == box.tolist()
    assert len({other.data_ptr() for other in others}) == len(others), "boxes that are in use are never dropped"


def test_streams_and_kernels_do_not_share(on_stream) -> None:
    own = on_stream(1)
    assert own.data_ptr() not in {on_stream(2).data_ptr(), on_stream(1, owner="router").data_ptr()}
