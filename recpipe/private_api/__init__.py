"""The only room that touches private names of torch, TorchRec and FBGEMM; all else uses their public API.

Checked against the releases in ``recpipe.common.versions``. When a release renames one of these names,
importing this room says which, in one line; this is the place to mend.
"""

from recpipe.common.versions import private_names

with private_names():
    from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from recpipe.private_api.collectives import Collective, count_collectives, leave
    from recpipe.private_api.engine import (
        IncompatibleKeys,
        add_to_each,
        backward_number,
        copy_each,
        forward_number,
        functorch_is_active,
        global_hooks,
        graph_is_kept,
        is_compiled,
        linear_pointwise,
        onednn_takes_bfloat16,
        operators_are_watched,
        steps_are_watched,
    )
    from recpipe.private_api.ids import HostIds
    from recpipe.private_api.nbit import (
        MEAN,
        NONE,
        SCALE_BIAS_BYTES,
        SUM,
        NbitLayout,
        fused_rows,
        look_up_nbit,
        remapped_ids,
    )
    from recpipe.private_api.shards import (
        OWN_KERNEL,
        Fetched,
        FusedLookup,
        LocalPart,
        LocalShard,
        OwnLookup,
        fuse,
        fused_lookups,
        give_back,
        given_to_own,
        local_shards,
        look_up_each_id,
        own_lookups,
        own_lookups_in,
        replicated_lookups,
        taken,
        unlock,
        unlocking,
    )
    from recpipe.private_api.tables import (
        Views,
        has_hooks,
        look_up_only,
        module_name,
        share_hooks,
        tbe_views,
        update_by_table,
        whole_state,
        whole_weights,
    )
