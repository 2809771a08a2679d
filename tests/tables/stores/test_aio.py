"""Batches of transfers through the kernel's AIO and through threads: same bytes, same errors."""

import errno
import os

import numpy as np
import pytest

from recpipe.tables.stores import aio


@pytest.fixture(params=["aio", "threads"])
def transfer(request):
    if request.param == "aio":
        try:
            made = aio.NativeAio(8)
        except OSError as error:
            pytest.skip(f"no native AIO here: {error}")
    else:
        made = aio.ThreadedIo(3)
    assert made.engine == request.param
    yield made
    made.close()


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def requests(fd, offsets, positions, lengths):
    return aio.Requests(
        np.full(len(offsets), fd), *(np.asarray(column, np.int64) for column in (offsets, positions, lengths))
    )


def test_round_trip(transfer, file):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 200 * 512, dtype=np.uint8)
    order = rng.permutation(200) * 512
    here = np.arange(200) * 512
    transfer.run(requests(file, order, here, np.full(200, 512)), data, write=True)
    assert os.fstat(file).st_size == len(data)
    back = np.zeros_like(data)
    transfer.run(requests(file, order[::-1], here[::-1], np.full(200, 512)), back, write=False)
    assert (back == data).all()


def test_nothing(transfer):
    transfer.run(requests(0, [], [], []), np.zeros(8, np.uint8), write=False)


def test_file_ends_early(transfer, file):
    os.pwrite(file, b"x" * 700, 0)
    wanted = requests(file, [0, 512], [0, 512], [512, 512])
    data = np.zeros(1024, np.uint8)
    with pytest.raises(aio.RequestError) as caught:
        transfer.run(wanted, data, write=False)
    assert (caught.value.index, caught.value.code) == (1, 0)
    assert bytes(data[:700]) == b"x" * 700


@pytest.mark.parametrize("bad", [0, 20, 49])
def test_error_names_the_request_and_spares_the_next_call(transfer, file, bad):
    os.pwrite(file, b"y" * 50 * 512, 0)
    here, data = np.arange(50) * 512, np.zeros(50 * 512, np.uint8)
    wanted = requests(file, here, here, np.full(50, 512))
    wanted.fds[bad] = 10**6
    with pytest.raises(aio.RequestError) as caught:
        transfer.run(wanted, data, write=False)
    assert (caught.value.index, caught.value.code) == (bad, errno.EBADF)
    transfer.run(requests(file, here, here, np.full(50, 512)), data, write=False)
    assert bytes(data) == b"y" * 50 * 512


def test_short_and_interrupted_transfers_go_on():
    blocks = np.zeros(4, aio.IOCB)
    blocks["bytes"], blocks["offset"], blocks["buffer"] = 4096, 8192, 1 << 20
    results = np.array([4096, 512, -errno.EINTR, -errno.EAGAIN])
    assert aio._remainders(blocks, np.arange(4), results).tolist() == [1, 2, 3]
    assert blocks["bytes"].tolist() == [4096, 3584, 4096, 4096]
    assert blocks["offset"].tolist() == [8192, 8704, 8192, 8192]
    assert blocks["buffer"][1] == (1 << 20) + 512
    with pytest.raises(aio.RequestError) as caught:
        aio._remainders(blocks, np.array([0, 3]), np.array([4096, 0, 0, -errno.EIO]))
    assert (caught.value.index, caught.value.code) == (3, errno.EIO)


def test_busy_kernel_is_asked_again(file, monkeypatch):
    try:
        transfer = aio.NativeAio(4)
    except OSError as error:
        pytest.skip(f"no native AIO here: {error}")
    os.pwrite(file, bytes(range(200)), 0)
    call, refusals = transfer._call, iter([errno.EAGAIN, errno.EINTR] * 5)

    def sometimes_busy(number, *arguments, **how):
        code = next(refusals, None)
        if code and (number == transfer._submit or code == errno.EINTR):
            raise OSError(code, os.strerror(code))
        return call(number, *arguments, **how)

    monkeypatch.setattr(transfer, "_call", sometimes_busy)
    data, here = np.zeros(200, np.uint8), np.arange(20) * 10
    transfer.run(requests(file, here, here, np.full(20, 10)), data, write=False)
    assert bytes(data) == bytes(range(200))
    monkeypatch.undo()
    transfer.close()


def test_refused_aio_is_reported(monkeypatch, caplog):
    def refuse(depth):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(aio, "NativeAio", refuse)
    transfer = aio.open_transfer(8, direct=True)
    assert transfer.engine == "threads"
    assert "no native AIO here" in caplog.text
    transfer.close()
