import numpy as np

from dflash_tools.extract.spool import Spool


def test_samples_come_back_in_any_order_and_nothing_stays(tmp_path):
    spool = Spool(tmp_path / "spool")
    samples = [(np.arange(n, dtype=np.int32), (np.arange(n) % 2).astype(np.uint8)) for n in (3, 1, 5)]
    for ids, mask in samples:
        spool.append(ids, mask)
    spool.close(np.array([3, 1, 5]))
    for position in (2, 0, 1):
        ids, mask = spool.read(position)
        assert np.array_equal(ids, samples[position][0])
        assert np.array_equal(mask, samples[position][1])
    spool.remove()
    assert not (tmp_path / "spool").exists()


def test_a_spool_replaces_what_a_stopped_one_left(tmp_path):
    folder = tmp_path / "spool"
    first = Spool(folder)
    first.append(np.arange(9, dtype=np.int32), np.ones(9, dtype=np.uint8))
    first.close(np.array([9]))
    second = Spool(folder)
    second.append(np.array([7], dtype=np.int32), np.array([1], dtype=np.uint8))
    second.close(np.array([1]))
    assert second.read(0)[0].tolist() == [7]
