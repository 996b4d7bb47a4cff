"""What the layers of a cache are, and tensors that look into their pages."""

from __future__ import annotations

from collections.abc import Sequence

from unikv.buffers import PoolStorage, Tensor
from unikv.geometry import TensorGeometry, extra_geometry, flat_geometry, kv_geometry, scale_geometry
from unikv.ids import GroupId, LayerId
from unikv.layer_spec import KVCacheLayerSpec, LayerOwner
from unikv.layout import CacheLayout, bytes_per_token, role_bytes_per_token


class LayerViews:
    """The part of a cache manager that kernels and model code look at. Tensors share the memory of the pools.

    Attributes:
        layout: layer groups, pools and buffers.
        pools: their memory.
    """

    def __init__(self, layout: CacheLayout, pools: PoolStorage, slots: Sequence[int]) -> None:
        """Look into `pools`, which have `slots` slots per pool group."""
        self.layout, self.pools = layout, pools
        self._slots = tuple(slots)

    @property
    def draft_layer_ids(self) -> tuple[LayerId, ...]:
        """Layers the drafter owns, in the order of the specs."""
        return tuple(spec.layer_id for spec in self.layout.specs if spec.is_draft)

    @property
    def layer_grouping(self) -> tuple[tuple[LayerId, ...], ...]:
        """Layers of each layer group, by group id."""
        return tuple(group.layer_ids for group in self.layout.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers and roles of this rank."""
        return sum(bytes_per_token(spec) for spec in self.layout.specs)

    def get_layer_spec(self, layer_id: LayerId) -> KVCacheLayerSpec:
        """Return the spec of a layer.

        Raises:
            UnknownLayerError: this rank holds no such layer. So do all the functions that take a layer id, and those
                that take a group id where there is no such group.
        """
        return self.layout.spec(layer_id)

    def get_layer_owner(self, layer_id: LayerId) -> LayerOwner:
        """Return whose layer it is."""
        return self.layout.spec(layer_id).owner

    def is_draft_layer(self, layer_id: LayerId) -> bool:
        """Return whether the drafter owns the layer."""
        return self.layout.spec(layer_id).is_draft

    def layer_kv_factor(self, layer_id: LayerId) -> int:
        """Return 2 for a layer with K and V, 1 for a key-only one."""
        return self.layout.spec(layer_id).kv_factor

    def layer_group_id(self, layer_id: LayerId) -> GroupId:
        """Return the layer group whose page table covers the layer."""
        return self.layout.group_of_layer(layer_id).group_id

    def get_layer_bytes_per_token(self, layer_id: LayerId, role: str | None = None) -> int:
        """Return the bytes one token takes in a layer: in one role, or in all of them.

        Raises:
            SpecError: the layer stores no such role.
        """
        spec = self.layout.spec(layer_id)
        return bytes_per_token(spec) if role is None else role_bytes_per_token(spec, role)

    def get_buffers(self, layer_id: LayerId) -> Tensor | None:
        """Return K and V of a layer, or None where it stores neither.

        Returns:
            ``[slots, kv_factor, heads, tokens_per_block, head_dim]`` (HND) or
            ``[slots, kv_factor, tokens_per_block, heads, head_dim]`` (NHD), zero-copy, with the stride of the physical
            slot. NVFP4 is packed: uint8 with ``head_dim / 2`` in the last dimension.
        """
        return self._tensor(kv_geometry(self.layout, layer_id, self._slots_of_layer(layer_id)))

    def get_scales(self, layer_id: LayerId) -> Tensor | None:
        """Return the block scales of an NVFP4 layer, None for every other layer.

        Returns:
            ``[..., head_dim / 16]`` float8_e4m3fn, with the leading dimensions of `get_buffers`.
        """
        return self._tensor(scale_geometry(self.layout, layer_id, self._slots_of_layer(layer_id)))

    def get_extra(self, layer_id: LayerId, role: str) -> Tensor:
        """Return the extra buffer `role` of a layer: ``[slots, tokens_per_block, bytes_per_token]`` uint8.

        Raises:
            SpecError: the layer declares no such extra.
        """
        return self.pools.tensor(extra_geometry(self.layout, layer_id, role, self._slots_of_layer(layer_id)))

    def get_flat_pages(self, layer_id: LayerId, *, sub_page_tokens: int | None = None) -> Tensor:
        """Return K and V of a layer as one list of pages, for kernels that take separate page ids for K and V.

        Args:
            layer_id: the layer.
            sub_page_tokens: read every page as smaller ones of this many tokens; must divide the block.

        Returns:
            ``[pages, heads, tokens, head_dim]`` (HND) or ``[pages, tokens, heads, head_dim]`` (NHD), starting at the
            layer's K in slot 0. `unikv.kernel_index.flat_page_index` turns slots into its page ids.

        Raises:
            SpecError: the layer stores no K, or the sub-page does not divide the block.
        """
        slots = self._slots_of_layer(layer_id)
        return self.pools.tensor(flat_geometry(self.layout, layer_id, slots, sub_page_tokens=sub_page_tokens))

    def num_slots(self, group_id: GroupId) -> int:
        """Return the slots of a layer group's pools, the null slot included. Pool mates share them."""
        return self._slots[self.layout.group(group_id).pool_group]

    def _slots_of_layer(self, layer_id: LayerId) -> int:
        return self.num_slots(self.layer_group_id(layer_id))

    def _tensor(self, geometry: TensorGeometry | None) -> Tensor | None:
        return None if geometry is None else self.pools.tensor(geometry)
