"""Files are read without running what lies in them."""

import gzip
import io
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from dflash_tools.convert.cache_file import FileFault, list_files, read_tensors
from dflash_tools.errors import DataError


class Evil:
    """Unpickled without care, it makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def torch_bytes(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_code_in_a_file_is_not_run(tmp_path, whole, packed, bare):
    trap = tmp_path / "trap"
    content = {"input_ids": torch.arange(3), "hidden_states": Evil(trap)}
    data = pickle.dumps(content, protocol=2) if bare else torch_bytes(content)
    path = tmp_path / ("evil.pt.gz" if packed else "evil.pt")
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(FileFault) as caught:
        read_tensors(path, whole=whole)
    assert not trap.exists()
    if not bare:
        assert caught.value.reason == "not_only_tensors"
        assert "posix.mkdir, which was not run" in caught.value.detail
    pickle.loads(pickle.dumps(Evil(trap)))
    assert trap.exists(), "the trap would not have sprung"


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["a.pt", "a.pt.gz", "a.safetensors", "a.safetensors.gz"])
def test_every_kind_of_file_gives_its_tensors(tmp_path, name, whole):
    content = {"ids": torch.arange(5), "states": torch.linspace(0, 1, 6).to(torch.bfloat16).reshape(2, 3)}
    plain = tmp_path / "plain"
    if "safetensors" in name:
        save_file(content, plain)
    else:
        plain.write_bytes(torch_bytes(content))
    data = plain.read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = read_tensors(tmp_path / name, whole=whole)
    assert found.keys() == content.keys()
    assert all(torch.equal(found[key], content[key]) for key in content)


@pytest.mark.parametrize("name", ["a.pt", "a.pt.gz", "a.safetensors"])
def test_a_file_cut_anywhere_is_a_fault_at_the_first_look(tmp_path, name):
    content = {"ids": torch.arange(50), "states": torch.ones(40, 8)}
    plain = tmp_path / "plain"
    if "safetensors" in name:
        save_file(content, plain)
    else:
        plain.write_bytes(torch_bytes(content))
    data = plain.read_bytes()
    data = gzip.compress(data) if name.endswith(".gz") else data
    for length in (0, 3, 9, len(data) // 3, len(data) // 2, len(data) - 1):
        (tmp_path / name).write_bytes(data[:length])
        with pytest.raises(FileFault) as caught:
            read_tensors(tmp_path / name, whole=False)
        assert caught.value.reason == "unreadable"


def test_a_flipped_bit_in_a_torch_file_is_found_when_it_is_read_whole(tmp_path):
    """ST-05: torch itself would load it without a word."""
    data = torch_bytes({"states": torch.ones(64, 64)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        place = next(entry for entry in archive.infolist() if "data/0" in entry.filename).header_offset + 200
    for offset in range(place, place + 16_000, 2_000):
        spoilt = bytearray(data)
        spoilt[offset] ^= 16
        (tmp_path / "a.pt").write_bytes(spoilt)
        with pytest.raises(FileFault, match="fails its checksum"):
            read_tensors(tmp_path / "a.pt", whole=True)


def test_a_disk_that_refuses_is_no_fault_of_the_file(tmp_path):
    with pytest.raises(DataError, match=r"gone\.pt: cannot be read .* run the same command again"):
        read_tensors(tmp_path / "gone.pt", whole=True)


def test_files_are_listed_by_name_through_all_folders_and_others_are_counted(tmp_path):
    for name in ("b/2.pt", "a/10.ckpt.gz", "a/2.pt.tmp", "c.txt", "a/9.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12")
    files, num_others = list_files(tmp_path, (".pt", ".pth", ".ckpt"))
    assert [(file.row, file.name, file.num_bytes) for file in files] == [
        (1, "a/10.ckpt.gz", 2),
        (2, "a/9.pth", 2),
        (3, "b/2.pt", 2),
    ]
    assert num_others == 2
    with pytest.raises(DataError, match="no such folder"):
        list_files(tmp_path / "absent", (".pt",))
