"""Managers with a host tier: suspending makes room, and whatever comes back is what went."""

import pytest
import torch

from unikv.budget import PoolBudget
from unikv.cache_manager import UnifiedKVCacheManager
from unikv.errors import CapacityError, SpecError
from unikv.host_tier_options import HostTierOptions
from unikv.ids import NO_PAGE, GroupId, RequestId
from unikv.layer_spec import KVCacheLayerSpec, KVDtype, LayerOwner, ReusePolicy
from unikv.request import ResumeResult

TPB, PAGES = 4, 12
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def layer(number, **changes):
    fields = {"owner": LayerOwner.TARGET, "num_kv_heads": 2, "head_dim": 16, "dtype": KVDtype.BFLOAT16}
    return KVCacheLayerSpec(layer_id=number, **{**fields, **changes})


LAYERS = [layer(0), layer(1, owner=LayerOwner.DRAFT, window=16, reuse_policy=ReusePolicy.OPTIONAL)]


@pytest.fixture(params=DEVICES)
def build(request):
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    managers = []

    def make(host=None, *, layers=LAYERS, pages=PAGES):
        manager = UnifiedKVCacheManager(
            layers,
            tokens_per_block=TPB,
            max_seq_len=256,
            pool=PoolBudget(pages=pages),
            device=request.param,
            host_tier=host,
        )
        managers.append(manager)
        return manager

    yield make
    for manager in managers:
        for number in list(manager._requests):
            manager._requests[number].close()
        manager.check_integrity()
        manager.close()


def write(manager, request, seed):
    """Write random numbers into every page of a request, and return them by layer and ordinal."""
    generator = torch.Generator().manual_seed(seed)
    content = {}
    for spec in manager.layout.specs:
        view = manager.get_buffers(spec.layer_id)
        row = request.page_table(manager.layer_group_id(spec.layer_id))
        for ordinal, slot in enumerate(row.tolist()):
            if slot != NO_PAGE:
                values = torch.randn(view.shape[1:], generator=generator).to(torch.bfloat16)
                view[slot] = values.to(view.device)
                content[spec.layer_id, ordinal] = values
    return content


def read(manager, request, key):
    layer_id, ordinal = key
    slot = int(request.page_table(manager.layer_group_id(layer_id))[ordinal])
    return manager.get_buffers(layer_id)[slot].cpu()


def fill_up(manager, first):
    """Open requests until no page is left, and write over everything."""
    hogs = []
    while True:
        hog = manager.create_request(RequestId(first + len(hogs)))
        hogs.append(hog)
        try:
            hog.resize(TPB)
        except CapacityError:
            return hogs
        write(manager, hog, 1000 + first + len(hogs))


@pytest.mark.parametrize("codec", ["identity", "fp8"])
def test_suspended_requests_make_room_and_come_back(build, codec):
    manager = build(HostTierOptions(pages=PAGES, codec=codec))
    requests, content = [], []
    for number in range(2):
        request = manager.create_request(RequestId(number))
        request.resize(5 * TPB, 3 * TPB)
        requests.append(request)
        content.append(write(manager, request, number))
    assert manager.num_free_pages(GroupId(0)) == 1
    for request in requests:
        request.suspend()
        assert (request.page_table(GroupId(0)) == NO_PAGE).all()
    assert manager.num_free_pages(GroupId(0)) == PAGES - 1, "held pages can leave the device"
    hogs = fill_up(manager, 100)
    assert len(hogs) == PAGES and manager.statistics.stored_pages > 0
    assert requests[0].resume() is ResumeResult.OUT_OF_PAGES
    for hog in hogs:
        hog.close()
    for request, pages in zip(requests, content, strict=True):
        assert request.resume() is ResumeResult.OK
        for key, values in pages.items():
            found = read(manager, request, key)
            if codec == "identity":
                assert torch.equal(found, values)
            else:
                bound = values.abs().float() * (2.0**-4 + 2.0**-7) + values.abs().max().float() / 448 * 2.0**-9
                assert ((found.float() - values.float()).abs() <= bound).all()
    assert manager.statistics.loaded_pages == manager.statistics.stored_pages
    manager.check_integrity()


def test_without_a_host_tier_suspended_requests_keep_their_pages(build):
    manager = build()
    request = manager.create_request(RequestId(0))
    request.resize(5 * TPB, 3 * TPB)
    content = write(manager, request, 1)
    request.suspend()
    assert manager.num_free_pages(GroupId(0)) == PAGES - 1 - 5
    hogs = fill_up(manager, 100)
    assert request.resume() is ResumeResult.OK
    assert all(torch.equal(read(manager, request, key), values) for key, values in content.items())
    for hog in hogs:
        hog.close()


def test_prefixes_outlive_pressure_on_the_host(build):
    manager = build(HostTierOptions(pages=PAGES))
    tokens = list(range(5 * TPB))
    first = manager.create_request(RequestId(1), tokens)
    first.resume()
    first.resize(5 * TPB)
    content = write(manager, first, 5)
    first.commit(tokens, is_end=True)
    first.close()
    for hog in fill_up(manager, 100):
        hog.close()
    again = manager.create_request(RequestId(2), [*tokens, 1, 2])
    assert again.history_tokens == 5 * TPB
    assert again.resume([GroupId(1)]) is ResumeResult.OK
    live = {(0, ordinal) for ordinal in range(5)} | {(1, ordinal) for ordinal in range(1, 5)}
    assert all(torch.equal(read(manager, again, key), content[key]) for key in live)
    assert again.page_table(GroupId(1))[0] == NO_PAGE and manager.statistics.reused_pages == 5 + 4


def test_a_host_tier_that_cannot_be_had_leaves_nothing_behind(build):
    with pytest.raises(SpecError, match="dtype under the fp8 codec"):
        build(HostTierOptions(pages=4, codec="fp8"), layers=[layer(0), layer(1, dtype=KVDtype.FLOAT16)])
