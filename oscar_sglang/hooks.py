"""THE patch surface: every touch on SGLang is a row of HOOKS or READS, or goes by its registries.

``plugin/registration.py`` puts the hooks in place and checks that they are. How the rows are held
against another SGLang: ``plugin/ledger.py``, ``oscar-sglang doctor --sglang``.
"""

from __future__ import annotations

from .plugin.ledger import Hook, Read, named

SGLANG_VERSION = "0.5.23"  # the one all tests and figures are from

_ARGS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_KVC = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SIZES = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_BATCH = "sglang.srt.managers.schedule_batch"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_REPORT_UNTIL = "pools can report their state"

# fmt: off
HOOKS = (
    Hook(f"{_ARGS}.add_cli_args", "AFTER", "arguments.add_cli_args", ("parser",),
         why="--kv-cache-dtype has a closed choice list", until="plugins may add flags"),
    Hook(f"{_ARGS}.from_cli_args", "AROUND", "arguments.from_cli_args", ("args",),
         why="it drops flags that are no fields", until="plugins may add flags"),
    Hook(f"{_ARGS}.resolve_once", "AROUND", "arguments.resolve", ("self",),
         why="our decisions come before the first named step, our checks after the last",
         until="register_resolution_hook knows a first and a last step"),
    Hook("sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype", "AROUND",
         "rank.kv_cache_dtype", ("server_args_kv_cache_dtype", "model", "model_dtype", "..."),
         why="closed if-chain over names", until="SGLang has a KV dtype registry"),
    Hook(f"{_KVC}._profile_available_bytes", "AFTER", "rank.available_bytes",
         ("self", "pre_model_load_memory"),
         why="windows, sinks and scratch come first", until="pools can declare a fixed cost"),
    Hook(f"{_SIZES}._compute_cell_size", "AROUND", "rank.cell_size", ("self", "kvc", "num_layers"),
         why="derived from the dtype's item size", until="pools can declare bytes per token"),
    Hook(f"{_KVC}.resolve_max_num_reqs", "AROUND", "rank.max_num_reqs", ("self", "token_capacity"),
         why="every request row owns exact windows", until="pools can declare a cost per request"),
    Hook(f"{_KVC}._build_req_to_token_pool", "AROUND", "rank.request_rows",
         ("self", "max_num_reqs"), why="--oscar-parked-rows: rows that only keep a ring",
         until="pools can declare rows of their own"),
    Hook(f"{_KVC}._build_mha_kv_pool", "AROUND", "rank.build_pool",
         ("self", "max_total_num_tokens", "mha_pool_class", "..."),
         why="the pool class is chosen in a closed if-chain", until="SGLang has a pool registry"),
    Hook(f"{_KVC}._build_hybrid_linear_kv_pool", "AROUND", "rank.build_pool",
         ("self", "max_total_num_tokens", "req_to_token_pool", "mha_pool_class", "..."),
         why="the same for a hybrid model's attention layers", until="SGLang has a pool registry"),
    Hook("sglang.srt.mem_cache.allocation.get_last_loc", "AROUND", "lifecycle.last_loc",
         ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
         why="backends unknown by name count as able to launch Triton, also on a CPU",
         until="the backend answers for itself"),
    Hook("sglang.srt.models.utils.enable_fused_set_kv_buffer", "AROUND", "lifecycle.fused_store",
         ("forward_batch",),
         why="models store K and V while they apply RoPE if the pool says bfloat16",
         until="SGLang asks the pool"),
    Hook("sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.swa_reprefill_tail_tokens",
         "AROUND", "lifecycle.reprefill_tail", ("self", "req"),
         why="--oscar-prefix-window recompute", until="a pool can ask for it"),
    Hook("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.swa_reprefill_tail_tokens",
         "AROUND", "lifecycle.reprefill_tail", ("self", "req"),
         why="--oscar-prefix-window recompute", until="a pool can ask for it"),
    Hook(f"{_POOLS}.ReqToTokenPool.alloc", "AROUND", "lifecycle.take_rows", ("self", "reqs"),
         why="exact tokens are counted from where a row's ring begins; which ring is taken over",
         until="SGLang keeps the first prefix length of a row, and lets a pool choose rows"),
    Hook(f"{_POOLS}.ReqToTokenPool.free", "AROUND", "lifecycle.leave_row", ("self", "req"),
         why="--oscar-prefix-window park: a ring outlives its request",
         until="pools are told of rows that are given back"),
    *(Hook(f"{_UPDATER}.{name}", "AROUND", f"weight_updates.{function}", ("self", "recv_req"),
           why="a calibration belongs to the weights it was measured on",
           until="pools are told of new weights")
      for name, function in (("update_weights_from_disk", "around_update"),
                             ("update_weights_from_ipc", "around_update"),
                             ("update_weights_from_distributed", "around_part"),
                             ("update_weights_from_tensor", "around_part"),
                             ("begin_weight_update", "around_begin"),
                             ("end_weight_update", "around_end"))),
    Hook(f"{_SCHEDULER}.flush_cache", "AFTER", "weight_updates.after_flush",
         ("self", "empty_cache"), why="a new calibration needs an empty cache",
         until="pools are told of a flush"),
    Hook(f"{_UPDATER}.resume_memory_occupation", "AFTER", "lifecycle.after_resume",
         ("self", "recv_req"), why="released memory comes back without what it held",
         until="pools are told"),
    Hook("sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init", "AROUND",
         "lifecycle.refuse_beams", ("self", "req", "recv_req"),
         why="beams exchange slots, but not windows of request rows", until="pools can refuse it"),
    Hook(f"{_SCHEDULER}.get_internal_state", "AFTER", "metrics.after_internal_state",
         ("self", "recv_req"), why="/server_info", until=_REPORT_UNTIL),
    Hook(f"{_REPORTER}._init_metrics", "AFTER", "metrics.after_init", ("self",),
         why="our gauges are registered beside SGLang's", until=_REPORT_UNTIL),
    *(Hook(f"{_REPORTER}.{name}", "AFTER", "metrics.after_report", takes,
           why="our gauges and log line at SGLang's own interval", until=_REPORT_UNTIL)
      for name, takes in (("report_prefill_stats", ("self", "...")),
                          ("report_decode_stats", ("self", "...")),
                          ("_maybe_log_idle_metrics", ("self",)))),
    Hook(f"{_REPORTER}.reset_metrics", "AFTER", "metrics.after_reset", ("self",),
         why="/flush_cache empties the cache without a report", until=_REPORT_UNTIL),
)

# What our modules read of SGLang's objects outside the hooks' parameters. "PACKAGE.*": any class
# in it, which is how ServerArgs gets its fields.
READS = (
    Read("sglang.srt.arg_groups.fields.*", (
        "attention_backend", "chunked_prefill_size", "cuda_graph_config", "device",
        "disaggregation_mode", "download_dir", "enable_strict_thinking",
        "json_model_override_args", "kv_cache_dtype", "load_format", "max_running_requests",
        "max_total_tokens", "mem_fraction_static", "model_path", "page_size", "revision",
        "tp_size"),
         by="startup, model_folder, refusals, rank, sglang_engine"),
    Read(_ARGS, ("resolve_once",), by="arguments, sglang_engine"),
    Read(_ENGINE, ("server_args_class",), by="arguments"),
    Read(_KVC, ("attn_dp_size", "device", "layer_info", "mambaish_config", "model_config",
                "model_dtype", "server_args"), by="rank, hybrid"),
    Read("sglang.srt.configs.model_config.ModelConfig", (
        "attention_arch", "context_len", "get_num_kv_heads", "get_total_num_kv_heads",
        "has_attention_sinks", "head_dim", "hf_config", "hf_text_config", "is_encoder_decoder",
        "is_hybrid_swa", "num_attention_heads", "num_hidden_layers", "v_head_dim"),
         by="refusals, rank, sglang_engine"),
    Read("sglang.srt.model_executor.model_runner.ModelRunner", (
        "attn_backend", "device", "forward", "model", "model_config", "req_to_token_pool",
        "server_args", "token_to_kv_pool"), by="backends, sglang_engine"),
    Read("sglang.srt.model_executor.forward_batch_info.ForwardBatch", (
        "batch_size", "extend_num_tokens", "extend_prefix_lens", "extend_prefix_lens_cpu",
        "extend_seq_lens", "extend_seq_lens_cpu", "forward_mode", "input_ids", "out_cache_loc",
        "positions", "req_pool_indices", "residual_stream", "seq_lens"),
        by="backends, sglang_stats"),
    Read("sglang.srt.layers.layer_boundary.residual.stream.ResidualStream", ("residual",),
         by="sglang_stats"),
    Read("sglang.srt.layers.radix_attention.RadixAttention", (
        "attn_type", "is_cross_attention", "layer_id", "logit_cap", "qk_head_dim", "scaling",
        "sliding_window_size", "tp_k_head_num", "tp_q_head_num", "tp_v_head_num", "v_head_dim"),
         by="backends"),
    Read("sglang.srt.layers.attention.base_attn_backend.AttentionBackend", (
        "forward_decode", "forward_extend", "get_cuda_graph_seq_len_fill_value",
        "init_cuda_graph_state", "init_forward_metadata", "init_forward_metadata_in_graph",
        "init_forward_metadata_out_graph"), by="backends (overridden)"),
    Read(f"{_POOLS}.MHATokenToKVPool", (
        "_create_buffers", "device", "dtype", "get_cpu_copy", "get_kv_size_bytes", "head_dim",
        "head_num", "layer_num", "load_cpu_copy", "memory_saver_adapter", "move_kv_cache",
        "page_size", "set_kv_buffer", "size", "start_layer"), by="memory_pool"),
    Read(f"{_POOLS}.HybridLinearKVPool", ("full_kv_pool",), by="hybrid"),
    Read(f"{_POOLS}.ReqToTokenPool", ("req_generation", "req_to_token"), by="backends, dump"),
    Read("sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator", (
        "available_size", "get_kvcache"), by="metrics, dump, lifecycle"),
    Read(f"{_BATCH}.Req", ("kv", "origin_input_ids", "output_ids", "prefix_len", "rid"),
         by="metrics, dump, lifecycle"),
    Read(f"{_BATCH}.ReqKvInfo", ("holds_kv", "kv_committed_len", "req_pool_idx"),
         by="metrics, dump, lifecycle"),
    Read(f"{_BATCH}.ScheduleBatch", ("reqs",), by="metrics, dump"),
    Read(_SCHEDULER, ("cur_batch_for_debug", "last_batch", "metrics_reporter", "req_to_token_pool",
                      "running_batch", "server_args", "token_to_kv_pool_allocator"),
         by="metrics, dump"),
    Read("sglang.srt.beam_search.coordinator.BeamCoordinator", ("token_to_kv_pool_allocator",),
         by="lifecycle"),
    Read("sglang.srt.session.streaming_session.StreamingSession", ("will_lend_record",),
         by="lifecycle"),
    Read("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache", ("session",),
         by="lifecycle"),
    Read(_UPDATER, ("_session", "offload_tags", "scheduler", "tp_cpu_group", "tp_worker"),
         by="weight_updates, lifecycle"),
    Read(_REPORTER, ("current_scheduler_metrics_enabled", "is_stats_logging_rank",
                     "last_decode_stats_tic", "last_prefill_stats_tic", "metrics_collector",
                     "scheduler"), by="metrics"),
    Read("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector", (
        "_counter_cls", "_gauge_cls", "labels", "last_log_time"), by="metrics"),
)
# fmt: on

register = named("registration.register")  # entry point of group sglang.srt.plugins
