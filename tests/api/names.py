"""Every public name of the documented interface, and the test that shows what it does.

``test_names.py`` reads this: each name exists, has the documented arguments, and its test is there.
A name is a path below ``smp``; members of objects that a script gets are below the names in
`INSTANCES`. Signatures have the documented arguments in their order, those of our own may follow.
"""

from __future__ import annotations

DIST, UNIT = "tests/dist/", "tests/unit/"
RUNTIME = f"{UNIT}test_runtime.py::"
GROUPS = f"{DIST}test_groups.py::test_public_functions_agree_with_the_grid"
TORCH_GROUPS = f"{DIST}test_groups.py::test_process_groups_reduce_over_the_listed_ranks"
OBJECTS = f"{DIST}test_object_comm.py::"
SEND = f"{OBJECTS}test_send_and_broadcast_count_ranks_in_the_named_group"
BARRIER = f"{OBJECTS}test_barrier_waits_for_the_own_group_only"
OUTPUTS = f"{DIST}test_step_outputs.py::"
MODEL = f"{DIST}test_step_model.py::"
LOCAL = f"{MODEL}test_local_modules_follow_the_manual_partition"
PARAMETERS = f"{MODEL}test_parameters_of_other_ranks_are_placeholders_of_true_shape"
STATES = f"{DIST}test_state_dict.py::"
LEGACY = f"{DIST}test_legacy_names.py::"
SLICES = f"{LEGACY}test_slices_are_found_joined_and_compared"
VIRTUAL = f"{LEGACY}test_sharded_parameters_have_virtual_ones"
LEGACY_UNIT = f"{UNIT}test_legacy_names.py::"
INDICES = f"{LEGACY_UNIT}test_parameters_have_indices_and_names"
OPTIMIZER = f"{UNIT}test_optimizer.py::"
PRECISION = f"{UNIT}test_precision.py::"
MEMBERS = f"{PRECISION}test_members_of_fp16_optimizers"
SPLIT = f"{DIST}test_nn_equality.py::test_split_modules_equal_one_process"
NN_UNIT = f"{UNIT}test_nn_modules.py::"
REPLACEMENT = f"{UNIT}test_replacement.py::"
CHECKPOINTING = f"{UNIT}test_activation_checkpointing.py::"
FUSED = f"{UNIT}test_fused_optimizers.py::test_steps_match_the_reference"
RESUME = f"{DIST}test_resume.py::test_equal_layouts_go_on_bit_by_bit"
SDP = f"{DIST}test_sharded_gathering.py::test_masters_of_a_group_lie_behind_each_other"
GRAD_SCALER = f"{DIST}test_precision_state.py::test_a_grad_scaler_skips_on_all_ranks"
CONTEXTS = f"{UNIT}test_partition_contexts.py::"

#: name: (documented arguments, or None for what is no function; test of its behaviour)
NAMES: dict[str, tuple[str | None, str]] = {
    # ---- init, state
    "init": ("config=None", f"{UNIT}test_runtime.py::test_later_init_merges_and_logs"),
    "auto": ("model, optimizer_factory, *, batch, seq=None, precision=None, memory=None, "
             "config=None, inputs=None, file='smp_auto.json', plan=None",
             f"{DIST}test_auto.py::test_modules_train_as_in_one_process_in_double"),
    "launch": ("main, n, *args", f"{DIST}test_launch.py::"
               "test_a_plain_script_gets_the_result_of_rank_0_and_goes_on"),
    "is_initialized": ("", f"{UNIT}test_runtime.py::test_state_follows_the_life_of_the_runtime"),
    "is_tracing": ("", f"{DIST}test_two_models.py::"
                   "test_a_function_that_needs_numbers_between_its_calls_is_told_and_works"),
    "state": (None, f"{UNIT}test_runtime.py::test_state_follows_the_life_of_the_runtime"),
    "state_mod": (None, f"{LEGACY_UNIT}test_the_state_is_one_object"),
    "state_mod.state": (None, f"{LEGACY_UNIT}test_the_state_is_one_object"),
    # ---- ranks, sizes, groups
    **{f"{kind}rank": ("", GROUPS) for kind in ("", "mp_", "dp_", "pp_", "tp_", "rdp_")},
    "local_rank": ("", f"{RUNTIME}test_local_rank_before_init_is_that_of_the_launcher"),
    **{f"{kind}size": ("", GROUPS) for kind in ("", "mp_", "dp_", "pp_", "tp_", "rdp_")},
    "local_size": ("", f"{DIST}test_groups.py::test_local_ranks_follow_simulated_hosts"),
    **{f"get_{kind}_group": ("", GROUPS) for kind in ("mp", "dp", "tp", "pp", "rdp", "world")},
    **{f"get_{kind}_process_group": ("", TORCH_GROUPS)
       for kind in ("world", "mp", "dp", "pp", "tp", "rdp")},
    # ---- enums
    "CommGroup": (None, SEND),
    **{f"CommGroup.{name}": (None, SEND)
       for name in ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP")},
    "RankType": (None, SEND),
    **{f"RankType.{name}_RANK": (None, SEND) for name in ("WORLD", "MP", "DP", "PP", "TP", "RDP")},
    **{name: (None, SEND)
       for name in ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP")},
    # ---- communication
    "broadcast": ("obj, group", SEND),
    "send": ("obj, dest_rank, rank_type", SEND),
    "recv_from": ("src_rank, rank_type", SEND),
    "allgather": ("obj, group", f"{OBJECTS}test_allgather_is_ordered_by_group_rank"),
    "barrier": ("group=WORLD", BARRIER),
    **{f"{kind}_barrier": ("", BARRIER) for kind in ("mp", "dp", "pp", "tp", "rdp")},
    # ---- step
    # By keyword alone: the function that it decorates comes first.
    "step": ("*, non_split_inputs=None, input_split_axes=None, detach_outputs=True",
             f"{OUTPUTS}test_all_decorator_forms_work"),
    "StepOutput": (None, f"{OUTPUTS}test_step_outputs_have_the_documented_form_on_every_rank"),
    "on_resize": ("callback", f"{DIST}test_going_on.py::"
                  "test_others_go_on_as_a_job_that_resumes_on_their_layout"),
    "Resized": (None, f"{DIST}test_going_on.py::"
                "test_others_go_on_as_a_job_that_resumes_on_their_layout"),
    "take_over": ("user_content", f"{DIST}test_spares.py::"
                  "test_a_spare_takes_the_place_and_the_job_is_as_if_none_had_died"),
    "batch_slice": ("num_samples", f"{DIST}test_uneven_devices.py::"
                    "test_uneven_devices_train_like_the_plain_script"),
    # ---- model
    "DistributedModel": (
        'module, trace_device="gpu", trace_execution_times=False, overlapping_allreduce=True, '
        "backward_passes_per_step=1, average_grads_across_microbatches=True, bucket_cap_mb=25, "
        "trace_memory_usage=False, broadcast_buffers=True, gradient_as_bucket_view=False, "
        "find_unused_parameters=False",
        f"{DIST}test_equality_own_models.py::test_auto_partition_trains_like_one_process_in_fp64",
    ),
    "model": (None, "tests/api/test_surface.py::test_v1_import_path_is_the_same_library"),
    "model.DistributedModel": (
        None, "tests/api/test_surface.py::test_v1_import_path_is_the_same_library"),
    "partition": ("index", f"{CONTEXTS}test_innermost_context_wins"),
    "set_partition": (
        "module, index",
        f"{CONTEXTS}test_set_partition_marks_the_subtree_and_later_calls_override"),
    "model_creation": ("tensor_parallelism=False, dtype=None, **tensor_parallel_config",
                       f"{REPLACEMENT}test_model_creation_has_a_default_dtype"),
    "tensor_parallelism": (
        "enabled=True, **kwargs", f"{REPLACEMENT}test_options_of_the_context_override_the_hook"),
    "set_tensor_parallelism": ("module, enabled=True, **kwargs",
                               f"{REPLACEMENT}test_a_tree_is_marked_after_it_was_made"),
    "delay_param_initialization": (
        "enabled=True", f"{REPLACEMENT}test_meta_modules_are_initialised_where_they_are_needed"),
    "delayed_parameter_initialization": (
        "enabled=True", f"{LEGACY_UNIT}test_the_alias_delays_initialisation"),
    "tp_register": ("dist_module, init_hook=None, forward_hook=None, return_hook=None",
                    f"{REPLACEMENT}test_a_decorated_class_is_registered"),
    "tp_register_with_module": (
        "module_cls, dist_module, init_hook=None, forward_hook=None, return_hook=None",
        f"{DIST}test_own_layer.py::test_own_layer_has_the_gradients_of_one_process"),
    "set_activation_checkpointing": (
        'module, preserve_rng_state=True, pack_args_as_tuple=False, strategy="each"',
        f"{CHECKPOINTING}test_tuples_need_not_be_announced"),
    # ---- optimizer
    "DistributedOptimizer": (
        "optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None",
        f"{OPTIMIZER}test_steps_are_those_of_the_wrapped_optimizer"),
    "optimizers": (None, FUSED),
    **{f"optimizers.{name}": (None, FUSED)
       for name in ("FusedLAMB", "FusedLamb", "FusedNovoGrad", "FusedAdam")},
    "amp": (None, GRAD_SCALER),
    "amp.GradScaler": (None, GRAD_SCALER),
    **{f"amp.GradScaler.{name}": (None, GRAD_SCALER)
       for name in ("scale", "unscale_", "step", "update", "get_scale", "is_enabled",
                    "state_dict", "load_state_dict")},
    # ---- parameters
    "whole_parameters": (
        "model, parameters=None",
        f"{DIST}test_script_writes.py::test_what_is_written_to_whole_parameters_stays"),
    # ---- checkpoints
    "save": ("obj, f, partial=True, pickle_module=pickle, pickle_protocol=2, v3=False",
             f"{STATES}test_training_resumes_bitwise_from_partial_and_full_files"),
    "load": ("f, map_location=None, pickle_module=pickle, partial=True, back_compat=False, "
             "**pickle_load_args", f"{STATES}test_a_missing_file_is_named"),
    "save_checkpoint": (
        "path, tag, partial=True, model=None, optimizer=None, user_content=None, "
        "translate_if_full=True, num_kept_partial_checkpoints=None", RESUME),
    "resume_from_checkpoint": (
        "path, tag=None, partial=True, strict=True, load_optimizer=True, "
        "load_sharded_optimizer_state=True, translate_function=None", RESUME),
    "wait_for_uploads": (
        "timeout_s=None", f"{DIST}test_stores.py::test_what_ranks_send_goes_on_elsewhere"),
    "sharded_data_parallel_checkpoint": (
        None, f"{LEGACY_UNIT}test_shards_are_merged_to_the_whole_model"),
    "sharded_data_parallel_checkpoint.get_full_state_dict_from_sharded_data_parallel_checkpoint": (
        "checkpoint_dir", f"{LEGACY_UNIT}test_shards_are_merged_to_the_whole_model"),
    # ---- nn
    "nn": (None, SPLIT),
    "nn.DistributedModule": (None, f"{REPLACEMENT}test_registration_refuses_other_classes"),
    "nn.DistributedLinear": ("in_features, out_features, bias=True", SPLIT),
    "nn.DistributedEmbedding": (
        "num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, "
        "scale_grad_by_freq=False, sparse=False, _weight=None, initializer_range=0.02, "
        "_skip_allgather=False, _skip_scatter_and_merge=False",
        f"{DIST}test_nn_equality.py::test_embedding_leaves_out_what_it_is_told_to"),
    "nn.DistributedTransformerLMHead": (
        "num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, "
        "intermediate_size=4096, vocab_size=30522, num_positions=1024, attention_dropout_prob=0.1, "
        'hidden_dropout_prob=0.1, activation="gelu", layernorm_epsilon=1e-5, num_token_types=0, '
        "causal_mask_size=None, add_cross_attention=False, add_lm_head=True, "
        "initializer_range=0.02, use_normal_initialization=False, pre_layernorm=False, "
        "post_layernorm=True", SPLIT),
    "nn.DistributedTransformer": (
        "num_layers=12, num_attention_heads=32, attention_head_size=32, hidden_size=1024, "
        "intermediate_size=4096, attention_dropout_prob=0.1, hidden_dropout_prob=0.1, "
        'activation="gelu", layernorm_epsilon=1e-5, initializer_range=0.02, '
        "use_normal_initialization=False, causal_mask_size=None, add_cross_attention=False, "
        "pre_layernorm=False, post_layernorm=True", SPLIT),
    "nn.DistributedTransformerLayer": (
        "num_attention_heads=32, attention_head_size=32, hidden_size=1024, intermediate_size=4096, "
        'attention_dropout_prob=0.1, hidden_dropout_prob=0.1, activation="gelu", '
        "layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False, "
        "causal_mask_size=None, add_cross_attention=False, pre_layernorm=False, "
        "post_layernorm=True, use_alibi=False, alibi_bias_max=8", SPLIT),
    "nn.DistributedAttentionLayer": (
        "num_attention_heads=32, attention_head_size=32, hidden_size=1024, "
        "attention_dropout_prob=0.1, hidden_dropout_prob=0.1, layernorm_epsilon=1e-5, "
        "initializer_range=0.02, use_normal_initialization=False, cross_attention=False, "
        "causal_mask_size=None, pre_layernorm=False, post_layernorm=True", SPLIT),
    "nn.DistributedTransformerOutputLayer": (
        'hidden_size=1024, intermediate_size=4096, hidden_dropout_prob=0.1, activation="gelu", '
        "layernorm_epsilon=1e-5, initializer_range=0.02, use_normal_initialization=False, "
        "pre_layernorm=False, post_layernorm=True, fp32_residual_addition=False", SPLIT),
    "nn.FlashAttentionLayer": (
        "attention_dropout_prob=0.1, attention_head_size=None, scale_attention_scores=True, "
        "scale_attn_by_layer_idx=False, layer_idx=None, scale=None, triton_flash_attention=False, "
        "use_alibi=False", f"{NN_UNIT}test_flash_attention_layer_equals_plain_attention"),
    "nn.FusedLayerNorm": ("normalized_shape, eps=1e-5, elementwise_affine=True",
                          f"{NN_UNIT}test_fused_layer_norm_is_a_layer_norm"),
    "nn.huggingface": (
        None, f"{UNIT}test_hf_translators.py::test_every_documented_name_is_one_function"),
    # ---- patches, utilities
    "patches.checkpoint.checkpoint": (
        "module, *args, preserve_rng_state=True",
        f"{CHECKPOINTING}test_any_structure_of_arguments_and_results"),
    "patches.checkpoint.checkpoint_sequential": (
        'sequential_module, input, strategy="each", preserve_rng_state=True, '
        "pack_args_as_tuple=False", f"{CHECKPOINTING}test_tuples_need_not_be_announced"),
    "utils": (None, SLICES),
    "utils.rmsg": ("msg", f"{LEGACY_UNIT}test_messages_carry_the_rank"),
    "utils.get_distribution_axis": ("param", SLICES),
}  # fmt: skip

#: Members of what a script holds. Those of 16-bit optimizers are there in every precision.
INSTANCES: dict[str, dict[str, tuple[str | None, str]]] = {
    "model": {
        "__call__": (None, f"{DIST}test_step_gradients.py::"
                     "test_plain_loop_without_step_works_without_pipeline"),
        "forward": (None, f"{DIST}test_step_gradients.py::"
                    "test_plain_loop_without_step_works_without_pipeline"),
        "backward": ("tensors, grad_tensors=None",
                     f"{DIST}test_step_gradients.py::test_backward_takes_lists_and_gradients"),
        "partitioned": (None, PARAMETERS),
        "module": (None, LOCAL),
        "get_module": ("", LOCAL),
        "local_buffers": ("", f"{MODEL}test_buffers_are_kept_by_the_rank_that_runs_the_module"),
        "local_named_buffers": (
            "", f"{MODEL}test_buffers_are_kept_by_the_rank_that_runs_the_module"),
        "local_parameters": ("", PARAMETERS),
        "local_named_parameters": ("", PARAMETERS),
        "local_modules": ("", LOCAL),
        "local_named_modules": ("", LOCAL),
        "virtual_named_parameters": ("", VIRTUAL),
        "local_state_dict": ("", f"{STATES}test_partial_state_dicts_load"),
        "state_dict": ("gather_to_rank0=False", f"{STATES}test_state_dicts_join_the_parts"),
        "load_state_dict": ("state_dict, strict=True, same_partition_load=False",
                            f"{STATES}test_full_state_dicts_load"),
        "register_post_partition_hook": ("hook", f"{MODEL}test_hooks_run_once_at_their_time"),
        "register_post_step_hook": ("hook", f"{MODEL}test_hooks_run_once_at_their_time"),
        "cpu": ("", f"{MODEL}test_cpu_gathers_the_whole_model"),
        "to": ("*args, **kwargs", f"{PRECISION}test_a_model_without_masters_can_change_its_dtype"),
        "join": ("", f"{DIST}test_join.py::test_training_equals_that_of_one_process"),
        "register_comm_hook": (
            "state, callable",
            f"{DIST}test_comm_hook.py::test_a_hook_that_averages_changes_nothing"),
        "_register_comm_hook": (
            "state, callable",
            f"{DIST}test_comm_hook.py::test_a_hook_that_averages_changes_nothing"),
        "distributed_modules": ("", f"{REPLACEMENT}test_only_marked_modules_are_replaced"),
        **{f"is_{kind}_{what}": (what, SLICES)
           for kind in ("distributed", "scaled_batch") for what in ("parameter", "buffer")},
        "default_reducer_named_parameters": ("", SLICES),
        "scaled_batch_reducer_named_parameters": ("", SLICES),
        **{name: (None, f"{DIST}test_step_outputs.py::test_evaluation_and_training_alternate")
           for name in ("train", "eval")},
        "zero_grad": ("set_to_none=True", f"{PRECISION}test_zero_grad_clears_masters"),
        **{name: (None, PARAMETERS) for name in ("parameters", "named_parameters", "modules",
                                                 "named_modules", "buffers", "children")},
    },
    "optimizer": {
        "state_dict": ("", f"{OPTIMIZER}test_ranks_save_their_part_and_gather_the_whole"),
        "load_state_dict": (
            "state_dict", f"{OPTIMIZER}test_a_full_state_is_loaded_after_partition_and_cut"),
        "local_state_dict": ("gather_if_shard=True",
                             f"{OPTIMIZER}test_ranks_save_their_part_and_gather_the_whole"),
        "step": ("closure=None", f"{OPTIMIZER}test_steps_are_those_of_the_wrapped_optimizer"),
        "zero_grad": ("set_to_none=True, set_grads_to_None=None",
                      f"{LEGACY_UNIT}test_gradients_are_dropped_by_the_legacy_keyword"),
        "param_groups": (None, f"{OPTIMIZER}test_groups_state_and_defaults_are_shared"),
        "state": (None, f"{OPTIMIZER}test_groups_state_and_defaults_are_shared"),
        "redefined_params": (None, VIRTUAL),
        "param_name_to_index": ("", INDICES),
        "_param_id_to_index": ("", INDICES),
        "_param_index_to_param_local": ("", INDICES),
        "clip_grad_norm": ("max_norm", f"{OPTIMIZER}test_clipping_adds_up_over_pipeline_ranks"),
        "step_was_skipped": (None, f"{OPTIMIZER}test_accelerate_finds_what_it_asks_for"),
        "_is_accelerate_prepared": (None, f"{OPTIMIZER}test_accelerate_finds_what_it_asks_for"),
        "optimizer": (None, f"{OPTIMIZER}test_schedulers_drive_it_without_warnings"),
        "overflow": (
            None, f"{DIST}test_precision.py::test_an_overflow_on_one_rank_skips_the_step_on_all"),
        "clip_master_grads": ("max_norm, norm_type=2",
                              f"{OPTIMIZER}test_clipping_matches_torch_in_one_process"),
        "loss_scale": (None, MEMBERS),
        "loss_scaler": (None, MEMBERS),
        "dynamic_loss_scale": (None, f"{LEGACY_UNIT}test_masters_have_their_names"),
        "first_closure_call_this_step": (None, MEMBERS),
        "backward": ("loss, update_master_grads=True, retain_graph=False",
                     f"{LEGACY_UNIT}test_backward_has_the_arguments_of_apex"),
        "update_master_grads": ("", MEMBERS),
        "inspect_master_grad_data": ("", MEMBERS),
        "reload_model_params": (
            "", f"{PRECISION}test_masters_are_reloaded_without_losing_precision"),
        "init_master_params": ("", f"{LEGACY_UNIT}test_masters_have_their_names"),
        "master_params_created": (None, MEMBERS),
        "fp16_groups": (None, MEMBERS),
        "fp32_from_fp16_groups": (None, MEMBERS),
        "fp32_from_fp32_groups": (None, MEMBERS),
        "fp32_from_fp16_paramid_groups": (None, MEMBERS),
        "fp32_from_fp16": (None, f"{LEGACY_UNIT}test_masters_have_their_names"),
        "fp32paramid_from_fp16paramid": (None, MEMBERS),
        "master_is_distributed": (None, MEMBERS),
        "master_distribution_axis": (None, MEMBERS),
        "_global_grad_norm": (
            None, f"{DIST}test_sharded_data_parallel.py::"
            "test_updates_clip_gradients_to_their_norm_over_all_shards"),
    },
    "state": {
        "cfg": (None, f"{UNIT}test_runtime.py::test_state_follows_the_life_of_the_runtime"),
        "module_manager": (
            None, f"{DIST}test_split_round_trip.py::test_weights_survive_bit_by_bit"),
        "param_index_to_name_tp_group": (None, SLICES),
        "param_name_to_index_tp_group": (None, SLICES),
    },
    "module_manager": {
        "translate_functions": (
            None, f"{DIST}test_split_round_trip.py::test_weights_survive_bit_by_bit"),
    },
    "step_output": {
        name: (None if name == "outputs" else "",
               f"{OUTPUTS}test_step_outputs_have_the_documented_form_on_every_rank")
        for name in ("outputs", "reduce_mean", "reduce_sum", "concat", "stack", "detach")
    },
    #: with sharded data parallelism
    "sharded_optimizer": {
        "_global_grad_norm": (None, SDP),
        "fp32_partitioned_groups_flat": (None, SDP),
        "ds_param_shard_group": (None, "tests/clients/test_gpt_scripts.py::"
                                 "test_client_d_trains_a_family"),
        "fp16_groups": (None, SDP),
    },
    "sharded_parameter": {
        name: (None, f"{DIST}test_initial_values.py::"
               "test_shards_are_cut_as_soon_as_a_module_has_its_values")
        for name in ("ds_shape", "ds_numel", "ds_tensor")
    },
    "ds_tensor": {
        name: (None, f"{DIST}test_initial_values.py::"
               "test_shards_are_cut_as_soon_as_a_module_has_its_values")
        for name in ("ds_numel", "data")
    },
}  # fmt: skip

#: Methods of users' own types: ``smp_slice(num_mb, mb, axis)``.
PROTOCOLS = {"smp_slice": f"{DIST}test_step_outputs.py::test_arguments_are_cut_as_documented"}

#: Import paths below ``smdistributed.modelparallel``, and names that clients take from them.
IMPORTS: dict[str, tuple[str, ...]] = {
    "": ("__version__",),
    "torch.nn": ("FusedLayerNorm", "FlashAttentionLayer", "huggingface"),
    "torch.nn.huggingface.gpt2": (
        "translate_hf_state_dict_to_smdistributed_gpt2", "translate_state_dict_to_hf_gpt2"),
    "torch.nn.huggingface.gptj": (
        "translate_hf_state_dict_to_smdistributed_gptj",
        "translate_state_dict_to_hf_gptj",
        "translate_hf_gptj_state_dict_to_smdistributed",
        "translate_hf_gptj_state_dict_to_smdistributed_gptj"),
    **{f"torch.nn.huggingface.{name}": (f"translate_state_dict_to_hf_{name}",)
       for name in ("gptneo", "gptneox", "bert", "roberta")},
    "torch.optimizers": ("FusedLAMB", "FusedLamb", "FusedNovoGrad", "FusedAdam"),
    "torch.amp": ("GradScaler",),
    "torch.patches.checkpoint": ("checkpoint", "checkpoint_sequential"),
    "torch.model": ("DistributedModel",),
    "torch.state_mod": ("state",),
    "torch.utils": ("rmsg", "get_distribution_axis"),
    "torch.step": ("StepOutput",),
    "torch.sharded_data_parallel_checkpoint": (
        "get_full_state_dict_from_sharded_data_parallel_checkpoint",),
    "test.torch.utils": ("dump_model", "verify"),
}  # fmt: skip
