import pytest
from make_store import make_store

from dflash_tools.errors import StoreError
from dflash_tools.store.manifest_file import check_file, read_manifest


def test_a_file_that_the_manifest_names_is_checked_by_its_bytes(tmp_path):
    store = make_store(tmp_path / "store", [8, 9, 10])
    manifest, name = read_manifest(store), "target/frozen.safetensors"
    assert check_file(store, manifest, name) == store / name
    content = bytearray((store / name).read_bytes())
    content[len(content) // 2] ^= 1
    (store / name).write_bytes(content)
    with pytest.raises(StoreError, match=r"frozen\.safetensors: the bytes are not those.*--repair"):
        check_file(store, manifest, name)
    (store / name).write_bytes(content[:-1])
    with pytest.raises(StoreError, match="expected"):
        check_file(store, manifest, name)
    (store / name).unlink()
    with pytest.raises(StoreError, match="missing"):
        check_file(store, manifest, name)
