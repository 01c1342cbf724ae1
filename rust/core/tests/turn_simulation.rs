//! The schedules in a model of a shared card: what turns keep and the grid does not.

mod simulation;

use ocgpu_core::schedule::PPM;
use simulation::{Fault, Kind, Outcome, Random, Scenario, Ungated, Work, World};

const PERCENT: u64 = PPM / 100;
const SECONDS: u64 = 30;
const BRIEF_SECONDS: u64 = 40;

fn steady(steps_ms: &[u64]) -> Vec<Work> {
    steps_ms.iter().map(|ms| Work::steady(ms * 1000)).collect()
}

/// Peers that always have work, with the lengths of their longest steps in milliseconds.
fn saturated() -> Vec<(Scenario, Vec<u64>)> {
    let equal: [(&str, &[u32], &[u64]); 13] = [
        ("2:1, 8 ms", &[2, 1], &[8]),
        ("1:1, 8 ms", &[1, 1], &[8]),
        ("2:1:1, 8 ms", &[2, 1, 1], &[8]),
        ("4:1, 8 ms", &[4, 1], &[8]),
        ("1x8, 8 ms", &[1; 8], &[8]),
        ("1x16, 8 ms", &[1; 16], &[8]),
        ("2:1, 30 ms", &[2, 1], &[30]),
        ("1x8, 30 ms", &[1; 8], &[30]),
        ("1:1, 8 and 30 ms", &[1, 1], &[8, 30]),
        ("2:1, 8 and 30 ms", &[2, 1], &[8, 30]),
        ("2:1, 30 and 8 ms", &[2, 1], &[30, 8]),
        ("4:1, 8 and 30 ms", &[4, 1], &[8, 30]),
        ("2:1:1, 8, 30 and 30 ms", &[2, 1, 1], &[8, 30, 30]),
    ];
    let mixed = [
        (Scenario::new("2:1, batched 12 ms", &[2, 1], &[Work::batched(10_200, 2000)]), vec![12]),
        (Scenario::new("2:1, mixture", &[2, 1], &[Work::mixture()]), vec![60]),
        (
            Scenario::new("1:1, 8 ms and mixture", &[1, 1], &[Work::steady(8000), Work::mixture()]),
            vec![8, 60],
        ),
        (prefills(0), vec![8, 300]),
    ];
    let equal =
        equal.map(|(name, weights, steps)| (Scenario::new(name, weights, &steady(steps)), steps.to_vec()));
    equal.into_iter().chain(mixed).collect()
}

/// A batch process beside one with prefills of 300 ms.
fn prefills(think_ms: u64) -> Scenario {
    let works = [Work::steady(8000), Work::chat(300, 60, 8000, think_ms)];
    Scenario::new("1:1, 8 ms and 300 ms prefills", &[1, 1], &works)
}

/// 2 to 8 peers of weights 1 to 4 with steps of 4 to 45 ms.
fn at_random(count: usize) -> Vec<(Scenario, Vec<u64>)> {
    let mut random = Random::new(5);
    let mut scenario = || {
        let peers = random.between(2, 8);
        let weights: Vec<u32> = (0..peers).map(|_| random.choose(&[1, 1, 2, 3, 4])).collect();
        let steps: Vec<u64> = (0..peers).map(|_| random.choose(&[4, 8, 12, 20, 30, 45])).collect();
        (Scenario::new("random", &weights, &steady(&steps)), steps)
    };
    (0..count).map(|_| scenario()).collect()
}

fn thinking() -> Vec<Scenario> {
    let batch = Work::steady(8000);
    vec![
        Scenario::new("batch and chat, 60 ms prefills", &[1, 1], &[batch, Work::chat(60, 60, 8000, 1000)]),
        prefills(1000),
        Scenario::new("4 chats", &[1; 4], &[Work::chat(60, 60, 8000, 1000)]),
        Scenario::new("8 chats", &[1; 8], &[Work::chat(60, 40, 8000, 3000)]),
        Scenario::new(
            "2:1:1, the third comes and goes",
            &[2, 1, 1],
            &[batch, batch, Work::chat(8, 300, 8000, 5000)],
        ),
    ]
}

fn run(scenario: &Scenario, kinds: &[Kind], seed: u64) -> Outcome {
    scenario.run(kinds, Ungated::WaitedOut, seed, SECONDS)
}

/// As `run`, for as long as many scenarios allow.
fn run_briefly(scenario: &Scenario, kinds: &[Kind], seed: u64) -> Outcome {
    scenario.run(kinds, Ungated::WaitedOut, seed, BRIEF_SECONDS)
}

fn micros(steps_ms: &[u64]) -> Vec<u64> {
    steps_ms.iter().map(|ms| ms * 1000).collect()
}

#[test]
fn turns_keep_the_shares_and_the_card_busy_whatever_the_steps() {
    let scenarios = saturated();

    let errors: Vec<u64> = (scenarios.iter())
        .map(|(scenario, steps)| {
            let outcome = run(scenario, &[Kind::Turn], 1);
            let steps = micros(steps);
            assert!(outcome.error_ppm <= 2 * PERCENT, "{}: error {outcome:?}", scenario.name);
            assert!(outcome.aggregate_ppm >= 97 * PERCENT, "{}: aggregate {outcome:?}", scenario.name);
            assert!(outcome.service_within(scenario, &steps, SECONDS), "{}: {outcome:?}", scenario.name);
            let bound_us = scenario.wait_bound_us(&steps);
            assert!(
                outcome.longest_wait_us <= bound_us * 105 / 100,
                "{}: {bound_us} {outcome:?}",
                scenario.name
            );
            outcome.error_ppm
        })
        .collect();

    assert!(errors.iter().sum::<u64>() / errors.len() as u64 <= PERCENT, "{errors:?}");
}

#[test]
fn the_grid_does_not_keep_unequal_steps_apart() {
    let scenario = Scenario::new("1:1, 8 and 30 ms", &[1, 1], &steady(&[8, 30]));

    let (grid, turn) = (run(&scenario, &[Kind::Seed], 1), run(&scenario, &[Kind::Turn], 1));

    assert!(grid.error_ppm > 40 * PERCENT, "{grid:?}");
    assert!(turn.error_ppm < 5 * PERCENT, "{turn:?}");
}

#[test]
fn random_peers_get_their_shares_and_nobody_waits_beyond_the_bound() {
    for (seed, (scenario, steps)) in at_random(60).iter().enumerate() {
        let outcome = run_briefly(scenario, &[Kind::Turn], seed as u64);

        let steps = micros(steps);
        let bound_us = scenario.wait_bound_us(&steps) * 105 / 100;
        assert!(outcome.error_ppm <= 3 * PERCENT, "{seed} {scenario:?} {outcome:?}");
        assert!(outcome.longest_gap_us <= bound_us, "{seed} {bound_us} {scenario:?} {outcome:?}");
        assert!(outcome.service_within(scenario, &steps, BRIEF_SECONDS), "{seed} {scenario:?} {outcome:?}");
        assert_eq!(outcome.steals, 0);
    }
}

#[test]
fn equal_steps_of_no_length_resonate_with_the_turns() {
    for (weights, percent) in [([2, 1].as_slice(), 4), (&[1, 1], 2), (&[4, 1], 7), (&[2, 1, 1], 4)] {
        for step_ms in [4, 14, 28, 44, 60] {
            let work = Work::batched(step_ms * 900, step_ms * 100);
            let outcome = run_briefly(&Scenario::new("sweep", weights, &[work]), &[Kind::Turn], 1);

            assert!(outcome.error_ppm <= percent * PERCENT, "{weights:?} {step_ms} ms: {outcome:?}");
        }
    }
}

#[test]
fn nobody_is_held_back_from_an_idle_card() {
    for scenario in thinking() {
        let turn = run(&scenario, &[Kind::Turn], 1);

        assert!(turn.wasted_ppm <= PERCENT, "{}: {turn:?}", scenario.name);
    }
    let grid = run(&thinking()[2], &[Kind::Seed], 1);
    assert!(grid.wasted_ppm > 10 * PERCENT, "the grid of four chats: {grid:?}");
}

#[test]
fn who_is_alone_never_waits() {
    let outcome = run(&Scenario::new("alone", &[1], &[Work::chat(60, 60, 8000, 500)]), &[Kind::Turn], 1);

    assert_eq!((outcome.longest_wait_us, outcome.wasted_ppm), (0, 0));
}

/// Steps per second of the survivor in the 3.5 s after a fault of the other, at worst of twelve moments in the
/// schedule, its longest stall, and both rates much later.
fn after(kind: Kind, faults: &[(i64, Fault)]) -> (u64, u64, [u64; 2]) {
    let scenario = Scenario::new("1:1, 8 ms", &[1, 1], &steady(&[8]));
    let (mut rate, mut stall_us, mut late) = (u64::MAX, 0, [u64::MAX; 2]);
    for phase in 0..12 {
        let at_us: u64 = 5_000_000 + 10_000 * phase;
        let mut world = scenario.world(kind, 3, 3_000_000);
        for (offset_us, fault) in faults {
            world.plan(at_us.saturating_add_signed(*offset_us), 1, *fault);
        }
        world.run_until(at_us + 9_000_000);
        let ends_us: Vec<u64> = ends_between(&world, 0, at_us - 100_000, at_us + 3_500_000);
        rate = rate.min(ends_us.iter().filter(|end| **end >= at_us).count() as u64 * 10 / 35);
        stall_us = ends_us.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(u64::MAX).max(stall_us);
        for (slot, late) in late.iter_mut().enumerate() {
            *late = (*late)
                .min(ends_between(&world, slot, at_us + 7_000_000, at_us + 9_000_000).len() as u64 / 2);
        }
    }
    (rate, stall_us, late)
}

fn ends_between(world: &World, slot: usize, from_us: u64, to_us: u64) -> Vec<u64> {
    world.ends_us(slot).iter().copied().filter(|end| (from_us..=to_us).contains(end)).collect()
}

#[test]
fn a_killed_peer_costs_its_neighbour_one_short_stall() {
    let (rate, stall_us, late) = after(Kind::Turn, &[(0, Fault::Kill)]);

    assert!(rate >= 116, "{rate} steps a second");
    assert!(stall_us <= 80_000, "{stall_us}");
    assert!(late[0] >= 117 && late[1] == 0, "{late:?}");
}

#[test]
fn a_stopped_peer_costs_one_turn_limit_and_comes_back_to_its_share() {
    let (rate, stall_us, late) = after(Kind::Turn, &[(0, Fault::Stop), (5_000_000, Fault::Continue)]);

    assert!(rate >= 114, "{rate} steps a second");
    assert!(stall_us <= 200_000, "{stall_us}");
    assert!(late.iter().all(|rate| (56..=61).contains(rate)), "{late:?}");
}

#[test]
fn three_of_four_go_on_with_their_shares_when_the_fourth_falls() {
    let scenario = Scenario::new("2:1:1:1, 8 ms", &[2, 1, 1, 1], &steady(&[8]));
    for fault in [Fault::Kill, Fault::Stop, Fault::Hang] {
        for phase in 0..6 {
            let at_us = 5_000_000 + 34_000 * phase;
            let mut world = scenario.world(Kind::Turn, 3, 3_000_000);
            world.plan(at_us, 3, fault);
            world.run_until(at_us + 10_000_000);

            let rates =
                [0, 1, 2].map(|slot| ends_between(&world, slot, at_us + 5_000_000, at_us + 10_000_000).len());
            let waits = [0, 1, 2].map(|slot| world.peers[slot].tally.longest_wait_us);
            let once_us = scenario.wait_bound_us(&[8000]) + 100_000;
            assert!((290..=304).contains(&rates[0]), "{fault:?} {phase}: {rates:?}");
            assert!(rates[1..].iter().all(|rate| (143..=154).contains(rate)), "{fault:?} {phase}: {rates:?}");
            assert!(waits.iter().all(|wait| *wait <= once_us * 105 / 100), "{fault:?} {phase}: {waits:?}");
        }
    }
}

#[test]
fn a_hung_peer_costs_one_turn_limit_although_its_heart_beats() {
    let (rate, stall_us, late) = after(Kind::Turn, &[(0, Fault::Hang)]);

    assert!(rate >= 113, "{rate} steps a second");
    assert!(stall_us <= 200_000, "{stall_us}");
    assert!(late[0] >= 117, "{late:?}");
}

#[test]
fn turns_do_not_care_about_the_wall_clock() {
    let (rate, stall_us, late) = after(Kind::Turn, &[(0, Fault::Clock(3600))]);
    let (after_death, _, _) = after(Kind::Turn, &[(-100_000, Fault::Kill), (0, Fault::Clock(-3600))]);
    let (grid_after_death, _, _) = after(Kind::Seed, &[(-100_000, Fault::Kill), (0, Fault::Clock(-3600))]);

    assert!(rate >= 57 && stall_us <= 60_000, "{rate} steps a second, {stall_us}");
    assert!(late.iter().all(|rate| (57..=61).contains(rate)), "{late:?}");
    assert!(after_death >= 118 && grid_after_death <= 70, "{after_death}, the grid's {grid_after_death}");
}

#[test]
fn beside_a_seed_peer_everything_is_as_between_seed_peers() {
    let scenarios = saturated();
    for (scenario, _) in [0, 1, 8, 10, 13].map(|index| &scenarios[index]) {
        let (seeds, mixed) = (run(scenario, &[Kind::Seed], 1), run(scenario, &[Kind::Turn, Kind::Seed], 1));

        assert_eq!((seeds.shares_ppm, seeds.p95_us), (mixed.shares_ppm, mixed.p95_us), "{}", scenario.name);
        assert_eq!(
            run(scenario, &[Kind::Turn, Kind::Grid], 1).error_ppm,
            seeds.error_ppm,
            "{}",
            scenario.name
        );
    }
}

/// Peers beside one, the last, that cannot be paused.
fn ungated() -> Vec<Scenario> {
    let batch = Work::steady(8000);
    vec![
        Scenario::new("1:1, 8 ms; ungated 8 ms", &[1, 1], &steady(&[8])),
        Scenario::new("1:1, 8 ms; ungated 30 ms", &[1, 1], &steady(&[8, 30])),
        Scenario::new("1:1, 30 ms; ungated 8 ms", &[1, 1], &steady(&[30, 8])),
        Scenario::new("1:1:1, 8 and 30 ms; ungated 8 ms", &[1, 1, 1], &steady(&[8, 30, 8])),
        Scenario::new("1:1:1, 8 and 30 ms; ungated 30 ms", &[1, 1, 1], &steady(&[8, 30, 30])),
        Scenario::new("1:1, 8 ms; ungated chat", &[1, 1], &[batch, Work::chat(300, 60, 8000, 1000)]),
        Scenario::new(
            "1:1:1, 8 and 30 ms; ungated chat",
            &[1, 1, 1],
            &[batch, Work::steady(30_000), Work::chat(300, 60, 8000, 1000)],
        ),
    ]
}

fn run_ungated(scenario: &Scenario, rule: Ungated) -> Outcome {
    let mut kinds = vec![Kind::Turn; scenario.weights.len()];
    kinds[scenario.weights.len() - 1] = Kind::Ungated;
    scenario.run(&kinds, rule, 1, SECONDS)
}

#[test]
fn an_ungated_peer_of_equal_weight_shares_the_card_as_the_driver_slices_it() {
    let outcome = run_ungated(&ungated()[0], Ungated::WaitedOut);

    assert!(outcome.error_ppm < 10_000, "{outcome:?}");
    assert_eq!(outcome.longest_wait_us, 0);
}

#[test]
fn an_ungated_peer_of_more_weight_is_left_what_it_lacks_in_turns() {
    let scenario = Scenario::new("1:2, 8 ms; ungated 8 ms", &[1, 2], &steady(&[8]));

    let (grid, turn) = (run_ungated(&scenario, Ungated::OnGrid), run_ungated(&scenario, Ungated::WaitedOut));

    assert!(turn.error_ppm < 100_000, "{turn:?}");
    assert!(grid.error_ppm > 300_000, "{grid:?}");
}

#[expect(clippy::print_stdout, reason = "the table is what this is run for")]
fn print_row(name: &str, policy: &str, outcome: &Outcome) {
    let percent = |ppm: u64| format!("{}.{}", ppm / PERCENT, ppm % PERCENT * 10 / PERCENT);
    let shares: Vec<String> = outcome.shares_ppm.iter().take(4).map(|share| percent(*share)).collect();
    println!(
        "| {name} | {policy} | {} | {} | {} | {} / {} / {} | {} | {} | {} |",
        percent(outcome.error_ppm),
        percent(outcome.aggregate_ppm),
        percent(outcome.wasted_ppm),
        outcome.p50_us / 1000,
        outcome.p95_us / 1000,
        outcome.longest_gap_us / 1000,
        outcome.longest_wait_us / 1000,
        outcome.first_p95_us / 1000,
        shares.join("/"),
    );
}

#[test]
#[ignore = "prints the table of all schedules and scenarios, to read with --nocapture"]
#[expect(clippy::print_stdout, reason = "the table is what this is run for")]
fn table_of_all_schedules_and_scenarios() {
    println!(
        "| scenario | schedule | error % | aggregate % | idle while wanted % | gap ms p50 / p95 / max | wait ms max | first token ms p95 | shares % |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let scenarios = saturated().into_iter().map(|(scenario, _)| scenario).chain(thinking());
    for scenario in scenarios {
        for (policy, kind) in [("seed", Kind::Seed), ("grid", Kind::Grid), ("turn", Kind::Turn)] {
            print_row(scenario.name, policy, &run(&scenario, &[kind], 1));
        }
    }
    for scenario in ungated() {
        for (policy, rule) in [
            ("grid", Ungated::OnGrid),
            ("turn, waited out", Ungated::WaitedOut),
            ("turn, ignored", Ungated::Ignored),
        ] {
            print_row(scenario.name, policy, &run_ungated(&scenario, rule));
        }
    }
}
