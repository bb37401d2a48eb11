//! `explain`: why a plan is as it is, and what else was possible.

use autoshard_planner::plan::OperatorEntry;
use autoshard_planner::routes::Routes;
use autoshard_planner::strategies;

use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::loaded::Loaded;
use crate::show;

/// Runs the command.
pub fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let loaded = Loaded::open(&args.plan)?;
    let (graph, assignment) = loaded.resolve()?;
    let plan = &loaded.plan;
    let Some(filter) = &args.op else {
        print!("{}", super::plan::summary(plan, None));
        println!(
            "\nName an operator, a scope or a part of one to see how it is split: autoshard explain {} NAME",
            args.plan.display()
        );
        return Ok(());
    };
    let wanted = filter.trim().to_lowercase();
    if wanted.is_empty() {
        return Err(
            Failure::usage("an empty name is part of every name").help("name an operator, a scope or a part of one")
        );
    }
    let blocks = autoshard_ir::blocks::find(&graph);
    let routes = Routes::new(&graph, &blocks);
    let price = |extra_s| show::extra(extra_s, plan.predicted.step_time_s);
    let mut shown = 0;
    for (class, (members, entry)) in blocks.nodes.iter().zip(&plan.operators).enumerate() {
        let node = graph.node(members[0]);
        let hit = members.iter().any(|&m| {
            let n = graph.node(m);
            [n.name.as_str(), n.scope.as_str(), n.op.name()].iter().any(|t| t.to_lowercase().contains(&wanted))
        });
        if !hit {
            continue;
        }
        shown += 1;
        println!("{}", heading(entry, &node.scope));
        let found = strategies::of_node(&graph, node, &assignment.mesh, routes.of(class));
        println!("  split     {}", show::strategy(&entry.strategy));
        match &entry.next_best {
            Some(n) => println!("  next best {}: {}", show::strategy(&n.strategy), price(n.extra_s)),
            None => println!(
                "  next best none that fits within the rules of the search: dp splits the batch, cp the sequence, tp products"
            ),
        }
        for (i, (&v, spec)) in node.inputs.iter().zip(&entry.inputs).enumerate() {
            println!("  {} {:<28} {spec}", if i == 0 { "operands " } else { "         " }, format!("{}", graph.ty(v)));
        }
        for (i, (&v, spec)) in node.outputs.iter().zip(&entry.outputs).enumerate() {
            println!("  {} {:<28} {spec}", if i == 0 { "results  " } else { "         " }, format!("{}", graph.ty(v)));
        }
        println!("  possible  {} ways on this mesh", found.list.len());
        for u in &found.unavailable {
            println!("  not       {u}");
        }
    }
    for (members, entry) in blocks.states.iter().zip(&plan.states) {
        let mut names = members.iter().map(|s| graph.state(*s).name.to_lowercase());
        if !names.any(|n| n.contains(&wanted)) {
            continue;
        }
        shown += 1;
        let alike = if entry.count > 1 { format!(", {} alike", entry.count) } else { String::new() };
        println!("state {} {}{alike}", entry.name, graph.ty(graph.state(members[0]).read));
        println!("  stored    {}", entry.storage);
        match &entry.next_best {
            Some(n) => println!("  next best {}: {}", n.storage, price(n.extra_s)),
            None => println!("  next best none that fits within the pins"),
        }
    }
    if shown == 0 {
        return Err(Failure::new(format!("no operator, name or scope contains `{filter}`"))
            .help("`autoshard inspect MODEL --dim ... --graph` lists them"));
    }
    Ok(())
}

fn heading(entry: &OperatorEntry, scope: &str) -> String {
    let mut times = if entry.count > 1 { format!(", {} alike", entry.count) } else { String::new() };
    if entry.recomputed > 0 {
        times += &format!(", recomputed {} times in the backward pass", entry.recomputed);
    }
    let scope = if scope.is_empty() { String::new() } else { format!(" in {scope}") };
    format!("{} {}{scope} ({}{times})", entry.op, entry.name, entry.section)
}
