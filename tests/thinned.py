"""Which cases of the costliest tests `make test` leaves to CI, so that it stays below six minutes on two cores.

`make test` keeps this many cases of a test, evenly spaced. CI, which sets PHALANX_TEST_LONG=1, runs all of them. So do you when
you name files, nodes or `-k`. A test that keeps no case has a relative in its file, or in the file named beside it, that makes a
similar claim at a smaller size or on another transport. The table follows a profile of processor time per test.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.long import LONG

KEPT = {
    "backend/test_collectives.py::test_ranks_that_come_late": 1,
    "backend/test_pytorch_suite.py::test_some_of_pytorchs_own_tests_pass": 0,  # .ci/backend has all of PyTorch's tests
    "backend/test_training.py::test_trains_as_on_gloo": 3,
    "cli/test_docs.py::test_the_network_of_the_tutorial_trains_and_resumes_on_two_ranks": 0,  # train/test_own_network.py
    "cli/test_export.py::test_a_directory_that_torch_reads_bit_for_bit": 1,
    "cli/test_plan.py::test_a_preset_is_a_file_to_edit": 0,  # cluster/test_machine.py
    "cli/test_selftest.py::test_under_torchrun": 0,  # test_alone; world/test_launchers.py has torchrun
    "cli/test_terminal.py::test_output_that_takes_nothing_is_one_line": 2,
    "cli/test_verify.py::test_a_torus_of_4096_ranks_takes_seconds_with_the_start_of_the_process": 0,  # smaller ones
    "cli/test_wrong_lines.py::test_a_report_of_anything_is_a_page_or_one_line": 2,
    "cluster/test_fair.py::test_the_simulator_agrees_with_events_one_by_one": 3,
    "cluster/test_least.py::test_no_schedule_is_faster_than_its_bound": 4,
    "cluster/test_plan.py::test_a_fit_finds_the_profile_that_made_the_rows": 0,  # cluster/test_calibrate.py
    "cluster/test_plan.py::test_noise_is_in_the_residual": 0,
    "cluster/test_plan.py::test_published_runs_come_out_right_in_the_recommended_configuration_too": 0,  # as they were run
    "cluster/test_plan.py::test_what_an_algorithm_takes_at_least_is_less_than_what_it_takes": 2,
    "cluster/test_simulate.py::test_the_shortcut_is_exact": 0,  # cluster/test_fair.py
    "cluster/test_synth.py::test_within_5_percent_of_the_bound_and_never_below_it": 6,
    "comm/test_meeting.py::test_a_rank_that_finds_another_job_leaves_at_once_and_says_why": 2,
    "comm/test_meeting.py::test_ranks_of_a_job_meet_and_leave_no_note": 2,
    "comm/test_places.py::test_a_reduce_scatter_of_any_size_returns_this_ranks_part": 3,
    "comm/test_start.py::test_ranks_hear_of_the_end_of_their_agent": 1,
    "data/test_instead_of_dataloader.py::test_batches_are_those_of_a_dataloader": 6,
    "data/test_loader.py::test_saved_on_four_ranks_resumed_on_others": 4,
    "data/test_loader.py::test_the_interpreter_leaves_though_much_is_prefetched": 0,  # data/test_worker_start.py
    "data/test_owed.py::test_every_sample_is_used_exactly_once_per_epoch": 5,
    "data/test_shuffle.py::test_a_resumed_run_goes_on_as_if_it_had_not_stopped": 3,
    "data/test_shuffle.py::test_threads_own_every_sample_once_and_train_it_once_an_epoch": 12,
    "data/test_stream.py::test_each_item_is_on_exactly_one_rank": 4,
    "examples/test_examples.py::test_ddp_with_our_hook_trains_as_ddp_does": 0,  # world/test_ddp_hook.py
    "examples/test_examples.py::test_the_plain_imagenet_script_resumes_too": 0,
    "fuzz/test_cluster.py::test_files_of_a_plan": 5,
    "grad/test_eight_bits.py::test_ranks_stay_equal_and_train_as_without": 2,
    "grad/test_gossip.py::test_news_of_a_death_reach_all_survivors_before_it_counts": 13,
    "grad/test_gossip.py::test_one_period_of_exact_is_the_mean_of_any_number_of_ranks": 4,
    "grad/test_gossip.py::test_weights_and_momentum_are_mixed_as_documented": 5,
    "grad/test_gossip_away.py::test_a_sleeper_comes_to_the_averages_of_all": 1,
    "grad/test_gossip_away.py::test_a_sleeper_takes_part_again": 1,
    "grad/test_gossip_gpu.py::test_a_gpu_mixes_as_a_cpu_and_the_host_waits_for_nothing": 4,
    "grad/test_low_rank.py::test_ranks_stay_equal_and_learn": 1,
    "grad/test_simple.py::test_both_averagers_give_the_same_means": 6,
    "lab/test_lab.py::test_rate_and_delay_are_those_that_were_asked": 1,
    "native/test_death.py::test_a_killed_rank_is_named_by_the_others": 3,
    "native/test_without.py::test_without_a_compiler_a_wheel_has_no_core_of_an_earlier_build": 0,
    "nn/test_models.py::test_any_image_size_gives_one_row_of_logits_per_image": 6,
    "optim/test_contract.py::test_every_optimizer_equals_one_process": 10,
    "optim/test_contract.py::test_lbfgs_with_strong_wolfe_equals_one_process": 1,
    "optim/test_equals_one_process.py::test_every_algorithm_on_every_world": 15,
    "optim/test_equals_one_process.py::test_lbfgs_decides_by_the_mean_loss": 3,
    "optim/test_local.py::test_resuming_is_exact_whatever_is_under_way": 4,
    "optim/test_loops.py::test_a_loop_computes_what_it_computes_alone": 8,
    "optim/test_loops.py::test_replicas_stay_equal_whatever_is_done_to_the_model": 8,
    "optim/test_survives.py::test_every_way_to_zero": 7,
    "optim/test_survives.py::test_random_training": 3,
    "selftest/test_checks.py::test_all_is_well": 4,
    "selftest/test_on_simulated_gpus.py::test_all_is_well": 1,
    "simulated_cuda/test_averager.py::test_a_nan_is_reported_a_few_steps_later_and_the_host_does_not_wait": 1,
    "simulated_cuda/test_averager.py::test_groups_leave_during_backward_without_being_tried_out": 1,
    "simulated_cuda/test_modes.py::test_four_gpus_on_two_hosts_train_as_the_cpu": 1,
    "simulated_cuda/test_modes.py::test_two_gpus_compute_the_bits_of_the_cpu": 6,
    "simulated_cuda/test_mutants.py::test_a_mutant_is_caught": 6,
    "simulated_cuda/test_verbs.py::test_verbs_answer_as_on_the_cpu": 6,
    "train/test_gpu.py::test_a_gpu_trains_and_counts_as_a_cpu": 1,
    "train/test_gpu.py::test_no_step_waits_for_the_device": 4,
    "train/test_initial_weights.py::test_a_run_starts_from_them_bit_for_bit": 6,
    "train/test_own_network.py::test_adamw_has_the_bits_of_a_plain_script": 1,
    "train/test_report_runs.py::test_the_spread_that_a_gossiping_run_writes_is_drawn": 0,  # train/test_report.py
    "train/test_stragglers.py::test_a_rank_that_sleeps_is_named_by_a_run": 1,
    "train/test_trainer.py::test_options_equal_one_process": 3,
    "warm/test_popen.py::test_programs_end_with_the_process_that_asked_for_them": 0,
    "world/test_algorithms.py::test_every_algorithm_is_exact_on_integers_and_leaves_the_same_bits_on_all_ranks": 2,
    "world/test_attacks.py::test_idle_connections_change_nothing_and_are_given_back": 0,  # comm/test_hotline.py
    "world/test_elastic.py::test_survivors_of_kills_at_random_moments_lose_nothing": 1,
    "world/test_elastic_hosts.py::test_all_hosts_but_the_meeting_point_are_lost": 1,
    "world/test_elastic_hosts.py::test_what_happens_when_the_majority_does_not_come_back": 1,
    "world/test_elastic_modes.py::test_a_killed_rank_is_replaced": 2,
    "world/test_ending.py::test_everything_that_the_user_wants_to_be_done_is_done_before_the_end": 1,
    "world/test_failures.py::test_exception_ends_all_ranks_and_its_traceback_comes_first": 2,
    "world/test_gossip.py::test_survivors_of_a_killed_rank_go_on_and_name_it": 1,
    "world/test_gossip.py::test_the_mean_stays_the_spread_contracts_and_average_ends_it": 1,
    "world/test_grid.py::test_processes": 2,
    "world/test_meeting.py::test_a_job_that_begins_where_another_has_just_ended_is_no_second_one": 0,
    "world/test_meeting.py::test_a_program_that_is_no_store_is_recognised_within_the_timeout": 1,
    "world/test_shm.py::test_tensors_of_any_size_pass_through_the_stage": 1,
    "world/test_shuffle.py::test_a_neighbour_that_dies_or_stops_is_an_error_and_no_hang": 0,  # world/test_failures.py
    "world/test_shuffle.py::test_processes_own_every_sample_once_and_train_it_once_an_epoch": 6,
    "world/test_trainer.py::test_precision": 0,  # train/test_trainer.py
    "world/test_training.py::test_dropped_optimizers_leave_nothing": 1,
    "world/test_training.py::test_ranks_equal_one_process": 3,
}


def applies(config: pytest.Config) -> bool:
    """Whether this run is of all tests, and not CI's."""
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword or config.option.markexpr
    return not LONG and not named


def left_to_ci(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases beyond those that `KEPT` allows; of the rest every second one, say."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if name in KEPT:
            cases.setdefault(name, []).append(item)
    left: set[pytest.Item] = set()
    for name, all_of_it in cases.items():
        count = min(KEPT[name], len(all_of_it))
        kept = {i * len(all_of_it) // count for i in range(count)} if count else set()
        left.update(item for i, item in enumerate(all_of_it) if i not in kept)
    return left
