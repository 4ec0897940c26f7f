"""What every argument of SGLang's server means to a 2-bit cache: one table, read by ``refusals``.

The cache depends on SGLang's rows (one per running request), slots (one per token), layers and
pool. A flag that changes the life of one of these is ``REFUSED``, or stands in ``WORKS`` with the
test that shows it. The rest is ``NEUTRAL``, and ``DETAILS`` only matter where their switch is on.
``tests/test_flags.py`` fails when the installed SGLang has a field that stands nowhere, or when a
field named here is gone. Standard library only.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

OFF = (None, False)
SIZE = (None, 0, 1)


@dataclass(frozen=True)
class Refused:
    """A field that int2 does not work with, unless its value is one of ``off``.

    why   what the flag does to the cache, for the message
    way   what to do instead, "" for: drop the flag
    """

    field: str
    why: str
    off: tuple = OFF
    way: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    def message(self, value: Any) -> str | None:
        """What to tell the operator about ``value``; None if it is allowed."""
        if value in self.off or value == "":
            return None
        shown = self.flag if value is True else f"{self.flag} {value}"
        return (
            f"--kv-cache-dtype int2 does not work with {shown} ({self.why}); "
            f"{self.way or f'drop {shown}'}"
        )


_GRAPHS = (None, "full", "disabled")
_OWN_ATTENTION = "the library of prefill: --oscar-prefill-attention fa3|flashinfer"
_GROUP = "ranks of one group would hold parts of a token's row; not built"
_BACKENDS = tuple(
    Refused(name, f"int2 chooses its own attention backend; {_OWN_ATTENTION}", (None, "oscar"))
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
)

REFUSED = (
    # Other pools, other trees, copies of pages.
    Refused("enable_hierarchical_cache", "HiCache copies BF16 buffers"),
    Refused("enable_lmcache", "LMCache copies BF16 buffers"),
    Refused("enable_flexkv", "FlexKV copies BF16 buffers"),
    Refused("enable_unified_cache_external_linker", "it copies BF16 buffers to another store"),
    Refused("radix_cache_backend", "a prefix cache that int2 has not been tested with"),
    Refused("enable_unified_memory", "it replaces the KV pool"),
    Refused("enable_page_major_kv_layout", "it replaces the KV pool"),
    Refused("enable_hisparse", "it replaces the KV pool"),
    Refused("enable_kv_cache_sharding", "it spreads the pages of the KV pool over ranks"),
    Refused("enable_dsa_cache_layer_split", "it spreads the layers of the KV pool over ranks"),
    Refused("prefill_only_disable_kv_cache", "there is no KV cache"),
    Refused("kv_canary", "it checks BF16 buffers", (None, "none")),
    # Rows that begin elsewhere.
    Refused("disaggregation_mode", "pages of 2-bit codes are not sent yet", (None, "null")),
    Refused(
        "encoder_only", "such a server has no KV cache", way="give int2 to the language server"
    ),
    Refused("enable_pdmux", "prefill and decode at once on one pool; not built"),
    # Who writes a row, and in what order.
    Refused("speculative_algorithm", "speculative decoding is not built yet", (None, "none")),
    Refused("decoupled_spec_role", "speculative decoding is not built yet", (None, "null")),
    Refused("dllm_algorithm", "diffusion models rewrite their cache"),
    Refused("enable_two_batch_overlap", "two batches in flight at once; not built"),
    Refused("enable_mis", "its items attend to a part of what lies before them"),
    Refused("enable_deterministic_inference", "not built yet"),
    Refused("rl_on_policy_target", "it turns on --enable-deterministic-inference; not built yet"),
    Refused("enable_amd_monokernel", "its kernels write and read a BF16 cache"),
    Refused("enable_nvidia_megakernel", "its kernels write and read a BF16 cache"),
    *_BACKENDS,
    # Ranks.
    Refused("attn_cp_size", _GROUP, SIZE),
    Refused("enable_prefill_cp", _GROUP),
    Refused("dcp_size", _GROUP, SIZE),
    Refused("enable_cp_decode_attn_tp", _GROUP),
    Refused("pp_size", "int2 counts the layers of one stage; not built", SIZE),
    Refused("attn_dp_size", "int2 has not been tested with attention groups", SIZE),
    Refused("enable_dp_attention", "int2 has not been tested with attention groups"),
    Refused("enable_attn_tp_input_scattered", "not tested: it scatters what attention reads"),
    Refused("enable_layernorm_sp", "not tested: it scatters what attention reads"),
    Refused("elastic_ep_backend", "not tested: ranks come and go while requests run"),
    Refused("use_ray", "it copies the arguments without ours"),
    # Graphs: those of prefill must leave attention out, the rest captures it itself.
    Refused(
        "cuda_graph_backend_prefill",
        "it captures attention",
        (None, "breakable", "disabled"),
        "drop it (breakable is SGLang's default) or set it to disabled",
    ),
    Refused("cuda_graph_backend_decode", "not tested", _GRAPHS),
    Refused("debug_cuda_graph", "not tested: it breaks decode graphs"),
    Refused("enable_torch_compile", "not tested: it traces attention"),
)

WORKS = {
    "serving/test_http.py::test_wide_windows_equal_sglangs_own_cache": "kv_cache_dtype",
    "serving/test_http.py::test_chat_completions_and_errors": "context_length dtype",
    "serving/test_page_sizes.py::test_page_size_changes_nothing_but_what_is_shared": "page_size",
    "serving/test_tensor_parallel.py::test_two_ranks_answer_like_one": """
        tp_size disable_overlap_schedule""",
    "serving/test_abuse.py::test_requests_with_aborts_retraction_and_flushes": """
        chunked_prefill_size enable_mixed_chunk max_running_requests max_total_tokens
        schedule_conservativeness""",
    "test_sizing.py::test_default_requests_of_qwen3_8b": "mem_fraction_static",
    "serving/test_models.py::test_family": "disable_radix_cache load_format",
    "serving/test_lora.py::test_adapters_share_one_cache": "enable_lora lora_paths lora_backend",
    "serving/test_metrics.py::test_gauges_follow_sglangs_interval_without_being_asked": """
        enable_metrics decode_log_interval""",
    "serving/test_refusals.py::test_quantised_weights_are_nothing_to_the_cache": "quantization",
    "serving/test_refusals.py::test_refused_before_weights_load": "device cuda_graph_config",
    "serving/test_entry_points.py::test_engine": "disable_cuda_graph",
    "serving/test_memory_saver.py::test_a_release_and_a_resume_change_no_answer": """
        enable_memory_saver""",
    "serving/test_sessions.py::test_turns_equal_the_whole_prompt": "enable_streaming_session",
    "serving/test_embedding.py::test_embeddings_equal_those_of_sglangs_own_cache": "is_embedding",
}

# Settings of what the named field switches on; that field is refused or, for a size, 1.
DETAILS = {
    "enable_hierarchical_cache": """
        hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts hicache_host_memory_fraction""",
    "enable_lmcache": "lmcache_config_file",
    "enable_flexkv": "flexkv_config_file",
    "enable_unified_cache_external_linker": """
        unified_cache_external_linker_backend unified_cache_external_linker_config
        enable_linker_mla_dedup""",
    "enable_hisparse": "hisparse_config",
    "kv_canary": "kv_canary_real_data kv_canary_sweep_interval",
    "disaggregation_mode": """
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup num_reserved_decode_tokens
        disaggregation_decode_extra_slots disaggregation_decode_polling_interval
        optimistic_prefill_attempts disaggregation_enable_kv_checksum enable_pd_role_switch
        disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
        dwdp_size""",
    "enable_pdmux": "pdmux_config_path sm_group_num",
    "encoder_only": "encoder_register_urls",
    "speculative_algorithm": """
        uno_lora_path speculative_draft_model_path speculative_draft_model_revision
        speculative_draft_load_format speculative_num_steps speculative_eagle_topk
        speculative_num_draft_tokens speculative_dflash_block_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling speculative_token_map
        speculative_attention_mode speculative_draft_attention_backend
        speculative_dsa_topk_backend speculative_draft_kv_cache_dtype
        speculative_draft_window_size speculative_draft_sink_size speculative_moe_runner_backend
        speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe
        speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set
        enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
        speculative_boundary_reduction speculative_use_block_verification
        enable_draft_weights_cpu_backup decrypted_draft_config_file linear_attn_verify_backend
        enable_linear_replayssm_spec enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids""",
    "decoupled_spec_role": """
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        spec_trace_dir""",
    "dllm_algorithm": "dllm_algorithm_config dllm_fdfo",
    "enable_two_batch_overlap": "tbo_token_distribution_threshold",
    "attn_cp_size": "cp_strategy enable_cp_tp_group_sharing",
    "dcp_size": "dcp_comm_backend dcp_replicate_q_proj",
    "pp_size": "pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking",
    "attn_dp_size": """
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all
        enable_dense_mlp_attn_tp enable_shared_experts_attn_tp shared_experts_tp_size
        disable_attn_tp_gather enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms""",
    "enable_layernorm_sp": "enable_megamoe_for_layernorm_sp",
    "elastic_ep_backend": """
        enable_elastic_expert_backup ep_join_mode ep_join_rank_offset elastic_ep_initial_size
        max_ep_size elastic_ep_scale_timeout mooncake_ib_device""",
    "enable_torch_compile": "enable_torch_compile_debug_mode torch_compile_max_bs",
}

NEUTRAL = {
    "the weights: where they come from, how they are stored and loaded": """
        model_path model_loader_extra_config trust_remote_code revision model_config_parser
        json_model_override_args quantization_param_path modelopt_quant
        modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        quantize_and_serve rl_quant_profile startup_weight_load_mode custom_weight_loader
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config download_dir model_checksum delete_ckpt_after_loading
        decrypted_config_file weight_cache_mode weight_cache_socket weight_cache_timeout
        enable_weights_cpu_backup cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend
        ple_offload_dir weight_version""",
    "the class that SGLang runs; its layers reach the cache through RadixAttention alike, and what "
    "they are is checked when the model is built (``refuse_layers``)": "model_impl",
    "weights that come after start-up: --oscar-on-weight-update decides":
        "checkpoint_engine_wait_weights_before_ready",
    "the front end: text, tokens, HTTP and gRPC": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init host port fastapi_root_path smg_grpc_mode
        grpc_mode grpc_port grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups
        enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name chat_template trust_request_chat_template hf_chat_template_name
        completion_template file_storage_path enable_cache_report return_input_ids
        return_output_ids reasoning_parser default_chat_template_kwargs enable_strict_thinking
        tool_call_parser tool_server sampling_defaults asr_max_buffer_seconds
        asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate stream_interval
        batch_notify_size stream_response_default_include_usage incremental_streaming_output
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode enable_response_store
        grpc_response_timeout_secs enable_http_worker_reuseport grammar_backend
        disable_outlines_disk_cache""",
    "images and sound: they become input embeddings before attention": """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
        mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport language_only language_model_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port
        enable_adaptive_dispatch_to_encoder enable_precise_embedding_interpolation""",
    "logits and what is sampled or returned of them": """
        enable_fp32_lm_head enable_custom_logit_processor enable_return_hidden_states
        return_hidden_states_mode enable_return_routed_experts sampling_mask_max_tokens
        sampling_backend enable_watermark watermark_config watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability
        watermark_default_enabled watermark_enforce_all""",
    "which request runs next, which is retracted, which cached prefix is evicted: what happens to "
    "its row and slots is the same (test_ownership.py does all of it at random)": """
        max_queued_requests prefill_decode_interval prefill_decode_interval_min_bs
        max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling
        disable_priority_preemption default_priority_value abort_on_priority_when_disabled
        schedule_low_priority_values_first priority_scheduling_preemption_threshold
        retraction_policy num_continuous_decode_steps scheduler_recv_interval min_free_slots_delay
        radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set
        enable_session_radix_cache strip_thinking_cache lora_drain_wait_threshold""",
    "processes, ports and hosts; each replica and rank has a pool of its own": """
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank dp_size
        load_balance_method base_gpu_id gpu_id_step random_seed watchdog_timeout
        soft_watchdog_timeout sleep_on_idle custom_sigquit_handler numa_node gc_threshold
        enable_p2p_check""",
    "how ranks exchange hidden states": """
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem pre_warm_nccl boundary_reduction enable_quant_communications
        enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode""",
    "experts and other feed-forward layers": """
        moe_dp_size ep_size moe_dense_tp_size enable_fused_moe_sum_all_reduce moe_a2a_backend
        enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend flashinfer_mxfp4_moe_precision
        deepep_mode fuseep_mode deepep_dispatcher_output_dtype ep_num_redundant_experts
        ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm
        eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config
        enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather
        disable_shared_experts_fusion enforce_shared_experts_fusion kt_weight_path kt_method
        kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token
        flashinfer_a2a_dispatch_type enable_paged_experts paged_experts_num_resident
        enable_single_batch_overlap""",
    "kernels of matrix products and of Q and K before attention": """
        enable_tf32_matmul fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        enable_fused_qk_norm_rope disable_flashinfer_autotune flashinfer_autotune_skip_ops""",
    "states of linear-attention layers, in a pool of their own": """
        mamba_backend mamba_ssm_dtype mamba_max_states_per_path
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval
        enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend enable_linear_replayssm
        linear_replayssm_cache_len max_mamba_cache_size mamba_full_memory_ratio""",
    "which batch sizes are captured; padded rows write to row 0": """
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill disable_prefill_cuda_graph disable_decode_cuda_graph
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc
        cuda_graph_max_seq_len_prefill""",
    "LoRA: which adapters are loaded, and how their products are computed": """
        enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras
        max_loras_per_batch lora_eviction_policy max_lora_chunk_size experts_shared_outer_loras
        lora_use_virtual_experts lora_strict_loading""",
    "logs, metrics, traces and dumps": """
        log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        smg_http_sidecar_port enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
        otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir
        stat_loggers debug_tensor_dump_output_folder debug_tensor_dump_layers
        debug_tensor_dump_input_file forward_hooks msprobe_dump_config
        enable_layerwise_nvtx_marker""",
    "read only by attention backends that int2 replaces": """
        enable_lean_attention triton_attention_reduce_in_fp32 triton_attention_num_kv_splits
        triton_attention_split_tile_size prefill_kv_cache_dequant_dtype""",
    "read only by models or machines that int2 refuses (MLA, sparse attention, sliding windows, "
    "short convolutions; NPU, MLX)": """
        flashinfer_mla_disable_ragged disable_chunked_prefix_cache dsa_prefill_backend
        dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union
        enable_dsa_fused_indexer dsv4_prefill_backend dsv4_attn_backend
        enable_deepseek_v4_fp4_indexer cuda_graph_prefill_max_context qsa_indexer_dtype
        enable_return_indexer_topk swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
        disable_hybrid_swa_memory swa_prefix_tails enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay enable_scattered_sconv c128_page_size
        mlx_enable_sampling""",
}  # fmt: skip


def classes() -> dict[str, list[str]]:
    """Field -> the classes it stands in: exactly one of refused, works, neutral, detail."""
    found: dict[str, list[str]] = {}
    for row in REFUSED:
        found.setdefault(row.field, []).append("refused")
    for name, table in (("works", WORKS), ("neutral", NEUTRAL), ("detail", DETAILS)):
        for names in table.values():
            for field in names.split():
                found.setdefault(field, []).append(name)
    return found


def field_defaults(server_args: type) -> dict[str, Any]:
    """Field -> default of SGLang's ``ServerArgs``; a new one for each call where it is mutable.

    ``MISSING`` where there is none.
    """
    from msgspec import NODEFAULT
    from msgspec.structs import fields

    return {
        f.name: f.default
        if f.default is not NODEFAULT
        else MISSING
        if f.default_factory is NODEFAULT
        else f.default_factory()
        for f in fields(server_args)
    }
