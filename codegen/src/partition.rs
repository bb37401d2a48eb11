//! From a graph and an assignment to the instruction lists of one stage: local shapes, inserted collectives, messages.
//!
//! Nodes are taken in the graph's order. Where a node wants an operand in another spec than it lies in, the steps of
//! [`autoshard_planner::reshard`] are inserted, and the result is kept for later users in the same list. Values that the
//! backward list needs are kept in the smallest spec in which the forward list has them, and resharded again where
//! they are used; parameters are gathered anew in every list (ZeRO-3 would not save memory otherwise).
//!
//! Sends and receives follow the graph's order in all stages, so no two stages can wait for each other; and a stage receives
//! from another in the order in which that one sends (see [`crate::transfer::Transfer::tag`]).
//!
//! Buffers have no place yet: see [`crate::assemble`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use autoshard_ir::graph::{Def, Section};
use autoshard_ir::{Graph, NodeId, Tensor, Type, ValueId};
use autoshard_planner::assignment::{Assignment, StageId};
use autoshard_planner::reshard::{self, StepKind};
use autoshard_planner::spec::Spec;
use autoshard_runtime::program::{Axis, Buffer, BufferId, Instr, List, Region, StateSlot};

use crate::error::CompileError;
use crate::transfer::{Transfers, list_of};

/// Specs of the operands and results of a node under its strategy.
#[derive(Debug, Clone)]
pub struct NodeSpecs {
    /// Of operands.
    pub inputs: Vec<Spec>,
    /// Of results.
    pub outputs: Vec<Spec>,
}

/// The specs of every node.
pub fn node_specs(graph: &Graph, a: &Assignment) -> Vec<NodeSpecs> {
    let specs = |id: NodeId| {
        let n = graph.node(id);
        let rule = n.op.factors(&graph.input_types(n), &graph.output_types(n));
        let strategy = a.strategy(id);
        NodeSpecs {
            inputs: (0..n.inputs.len()).map(|i| strategy.input_spec(&rule, i)).collect(),
            outputs: (0..n.outputs.len()).map(|i| strategy.output_spec(&rule, i)).collect(),
        }
    };
    graph.node_ids().map(specs).collect()
}

/// Which buffers live longer than one list, before they have a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasting {
    /// As long as reads and writes say.
    ByUse,
    /// For ever: states, constants, sums over micro-batches, parameters of other stages.
    Persistent,
}

/// The lists of a stage, with buffers that have no place yet.
pub struct Stage {
    /// Buffers; region and offset are not meaningful yet.
    pub buffers: Vec<Buffer>,
    /// By [`BufferId`].
    pub lasting: Vec<Lasting>,
    /// By [`List`].
    pub lists: [Vec<Instr>; 4],
    /// States kept by this stage.
    pub states: Vec<StateSlot>,
    /// Constants of this stage.
    pub constants: Vec<(BufferId, Arc<Tensor>)>,
}

/// A copy of a value in this stage.
#[derive(Debug, Clone)]
struct Version {
    spec: Spec,
    buffer: BufferId,
    list: List,
    persistent: bool,
}

struct Partition<'a> {
    graph: &'a Graph,
    a: &'a Assignment,
    stage: StageId,
    specs: &'a [NodeSpecs],
    transfers: &'a Transfers,
    out: Stage,
    versions: HashMap<ValueId, Vec<Version>>,
    /// Messages not yet received, by sender and list, in the order of sending.
    expected: BTreeMap<(StageId, List), BTreeMap<u32, ValueId>>,
    list: List,
}

/// Builds the lists of one stage.
pub fn stage(
    graph: &Graph,
    a: &Assignment,
    stage: StageId,
    specs: &[NodeSpecs],
    transfers: &Transfers,
) -> Result<Stage, CompileError> {
    let out = Stage {
        buffers: Vec::new(),
        lasting: Vec::new(),
        lists: Default::default(),
        states: Vec::new(),
        constants: Vec::new(),
    };
    let mut expected: BTreeMap<(StageId, List), BTreeMap<u32, ValueId>> = BTreeMap::new();
    for (v, by_stage) in &transfers.of {
        if let (Some(t), Some((from, _))) = (by_stage.get(&stage), crate::transfer::home(graph, a, specs, *v))
            && !matches!(graph.value(*v).def, Def::State(_))
        {
            expected.entry((from, t.list)).or_default().insert(t.tag, *v);
        }
    }
    let versions = HashMap::new();
    let mut p = Partition { graph, a, stage, specs, transfers, out, versions, expected, list: List::Prologue };
    p.states()?;
    let sections = [
        (List::Prologue, Section::Forward),
        (List::Forward, Section::Forward),
        (List::Backward, Section::Backward),
        (List::Update, Section::Update),
    ];
    for (list, section) in sections {
        p.list = list;
        p.section(section)?;
    }
    Ok(p.out)
}

fn axes(of: &[autoshard_planner::mesh::AxisId]) -> Vec<Axis> {
    of.iter().map(|a| Axis(a.0)).collect()
}

impl Partition<'_> {
    fn place(&self, v: ValueId) -> String {
        let name = match self.graph.producer(v) {
            Some(n) => format!("{n} ({}, {})", self.graph.node(n).name, self.graph.node(n).op),
            None => self.graph.value(v).name.clone(),
        };
        format!("value {v} of {name}")
    }

    fn buffer(&mut self, v: ValueId, spec: &Spec, lasting: Lasting) -> Result<BufferId, CompileError> {
        let ty = self.graph.ty(v);
        let local = spec.local(ty, &self.a.mesh).ok_or_else(|| CompileError::Uneven {
            place: self.place(v),
            ty: ty.to_string(),
            spec: spec.show(&self.a.mesh),
        })?;
        let name = match (&self.graph.value(v).name[..], self.graph.producer(v)) {
            ("", Some(n)) => format!("{v} {}", self.graph.node(n).op.name()),
            ("", None) => v.to_string(),
            (name, _) => name.to_string(),
        };
        let id = BufferId(self.out.buffers.len() as u32);
        self.out.buffers.push(Buffer {
            name: format!("{name} {}", spec.show(&self.a.mesh)),
            ty: local,
            global: ty.dims.clone(),
            shards: spec.dims.iter().map(|d| axes(d)).collect(),
            region: Region::Scratch,
            offset: 0,
        });
        self.out.lasting.push(lasting);
        Ok(id)
    }

    fn push(&mut self, instr: Instr) {
        self.out.lists[self.list as usize].push(instr);
    }

    fn add_version(&mut self, v: ValueId, spec: Spec, buffer: BufferId, persistent: bool) {
        let list = self.list;
        self.versions.entry(v).or_default().push(Version { spec, buffer, list, persistent });
    }

    /// States at home, and the messages that bring those of other stages.
    fn states(&mut self) -> Result<(), CompileError> {
        for s in self.graph.state_ids() {
            let state = self.graph.state(s);
            let home = self.a.home[s.index()];
            if home == self.stage {
                let spec = self.a.storage(s).clone();
                let buffer = self.buffer(state.read, &spec, Lasting::Persistent)?;
                let init = match &state.init {
                    autoshard_ir::graph::Init::Weight(w) => Some(w.clone()),
                    autoshard_ir::graph::Init::Zeros => None,
                };
                self.out.states.push(StateSlot { name: state.name.clone(), kind: state.kind, buffer, init });
                self.add_version(state.read, spec, buffer, true);
                // Here, before the step changes it.
                self.fetch(state.read)?;
                self.send(state.read)?;
            } else if let Some(t) = self.transfers.of.get(&state.read).and_then(|m| m.get(&self.stage)).cloned() {
                let output = self.buffer(state.read, &t.spec, Lasting::Persistent)?;
                self.push(Instr::Recv { output, from: home.0.into(), tag: t.tag });
                self.add_version(state.read, t.spec.clone(), output, true);
            }
        }
        Ok(())
    }

    /// All nodes of a section that this stage runs in the current list.
    fn section(&mut self, section: Section) -> Result<(), CompileError> {
        let last_use = self.last_reads_of_states(section);
        let mut pending: Vec<(usize, autoshard_ir::StateId, BufferId)> = Vec::new();
        match self.list {
            List::Forward if self.stage == StageId(0) => {
                self.fetch_unmade(|d| matches!(d, Def::Input(_) | Def::Const(_)))?;
            }
            List::Update => self.sums()?,
            _ => {}
        }
        for id in self.graph.node_ids() {
            let n = self.graph.node(id);
            let here = n.section == section && self.transfers.once[id.index()] == (self.list == List::Prologue);
            if !here || !self.transfers.runs[id.index()].contains(&self.stage) {
                continue;
            }
            self.node(id)?;
            // Of a node that runs on several stages, one delivers.
            if self.a.stage[id.index()] == self.stage && !n.is_accumulate() {
                for &v in &n.outputs {
                    self.fetch(v)?;
                    self.send(v)?;
                }
            }
            self.writes(id.index(), &n.outputs, &last_use, &mut pending)?;
        }
        self.made_elsewhere(&mut pending)?;
        for (_, s, new) in pending {
            self.write(s, new)?;
        }
        if matches!(self.list, List::Prologue | List::Forward) {
            self.late_receives()?;
        }
        Ok(())
    }

    fn node(&mut self, id: NodeId) -> Result<(), CompileError> {
        let (n, specs) = (self.graph.node(id), &self.specs[id.index()]);
        let mut inputs = Vec::with_capacity(n.inputs.len());
        for (i, &v) in n.inputs.iter().enumerate() {
            inputs.push(self.get(v, &specs.inputs[i])?);
        }
        if n.is_accumulate() {
            let (v, spec) = (n.outputs[0], specs.outputs[0].clone());
            let buffer = if self.a.micro_batches == 1 {
                inputs[0]
            } else {
                let output = self.buffer(v, &spec, Lasting::Persistent)?;
                self.push(Instr::Accumulate { input: inputs[0], output });
                output
            };
            self.add_version(v, spec, buffer, true);
            return Ok(());
        }
        let mut outputs = Vec::with_capacity(n.outputs.len());
        for (i, &v) in n.outputs.iter().enumerate() {
            let buffer = self.buffer(v, &specs.outputs[i], self.lasting())?;
            self.add_version(v, specs.outputs[i].clone(), buffer, self.list == List::Prologue);
            outputs.push(buffer);
        }
        let name = if n.scope.is_empty() { n.name.clone() } else { format!("{}: {}", n.scope, n.name) };
        self.push(Instr::Compute { name, op: n.op.clone(), inputs, outputs });
        Ok(())
    }

    /// Sums over micro-batches, complete now: to other stages and to the caller.
    fn sums(&mut self) -> Result<(), CompileError> {
        for id in self.graph.node_ids() {
            let n = self.graph.node(id);
            if n.is_accumulate() && self.a.stage[id.index()] == self.stage {
                self.send(n.outputs[0])?;
                self.fetch(n.outputs[0])?;
            }
        }
        Ok(())
    }

    /// Sends a value to the stages that use it.
    fn send(&mut self, v: ValueId) -> Result<(), CompileError> {
        for (to, t) in self.transfers.of.get(&v).cloned().unwrap_or_default() {
            let input = self.get(v, &t.spec)?;
            self.push(Instr::Send { input, to: to.0.into(), tag: t.tag });
        }
        Ok(())
    }

    /// Gives a value to the caller, if it is an output; partial sums are combined first.
    fn fetch(&mut self, v: ValueId) -> Result<(), CompileError> {
        for (port, o) in self.graph.outputs.iter().enumerate() {
            if o.value == v {
                let input = self.whole(v)?;
                self.push(Instr::Fetch { input, port });
            }
        }
        Ok(())
    }

    /// Gives outputs that no node makes to the caller.
    fn fetch_unmade(&mut self, of: impl Fn(&Def) -> bool) -> Result<(), CompileError> {
        let values: BTreeSet<ValueId> = self.graph.outputs.iter().map(|o| o.value).collect();
        values.into_iter().filter(|v| of(&self.graph.value(*v).def)).try_for_each(|v| self.fetch(v))
    }

    /// A version of a value that is not partial, sharded as it is.
    fn whole(&mut self, v: ValueId) -> Result<BufferId, CompileError> {
        let spec = match self.visible(v).iter().find(|x| x.spec.partial.is_empty()) {
            Some(x) => x.spec.clone(),
            None => match self.visible(v).first() {
                Some(x) => x.spec.combined(),
                None => match self.graph.value(v).def {
                    Def::Input(port) => self.a.inputs[port].clone(),
                    _ => Spec::replicated(self.graph.ty(v).rank()),
                },
            },
        };
        self.get(v, &spec)
    }

    /// For each state, the last node of this stage and section that reads its old content.
    fn last_reads_of_states(&self, section: Section) -> HashMap<ValueId, usize> {
        let mut last = HashMap::new();
        for id in self.graph.node_ids() {
            let n = self.graph.node(id);
            if n.section == section && self.transfers.runs[id.index()].contains(&self.stage) {
                for &v in &n.inputs {
                    if matches!(self.graph.value(v).def, Def::State(_)) {
                        last.insert(v, id.index());
                    }
                }
            }
        }
        last
    }

    /// Writes states whose new value a node made, as soon as nobody reads the old one any more.
    fn writes(
        &mut self,
        node: usize,
        outputs: &[ValueId],
        last_use: &HashMap<ValueId, usize>,
        pending: &mut Vec<(usize, autoshard_ir::StateId, BufferId)>,
    ) -> Result<(), CompileError> {
        for s in self.graph.state_ids() {
            let state = self.graph.state(s);
            if self.a.home[s.index()] == self.stage && state.write.is_some_and(|w| outputs.contains(&w)) {
                let w = state.write.expect("just tested");
                let new = self.get(w, self.a.storage(s))?;
                pending.push((last_use.get(&state.read).copied().unwrap_or(0), s, new));
            }
        }
        let (due, later) = pending.drain(..).partition(|(last, ..)| *last <= node);
        *pending = later;
        for (_, s, new) in due {
            self.write(s, new)?;
        }
        Ok(())
    }

    fn write(&mut self, s: autoshard_ir::StateId, new: BufferId) -> Result<(), CompileError> {
        let home = self.out.states.iter().find(|x| x.name == self.graph.state(s).name);
        let output = home.map(|x| x.buffer).expect("states at home are listed first");
        if new != output {
            self.push(Instr::Copy { input: new, output });
        }
        Ok(())
    }

    /// New contents of states that no node of this stage makes: those that come from other stages in the current list,
    /// and in `Update` those that no node makes.
    fn made_elsewhere(
        &mut self,
        pending: &mut Vec<(usize, autoshard_ir::StateId, BufferId)>,
    ) -> Result<(), CompileError> {
        for s in self.graph.state_ids() {
            let state = self.graph.state(s);
            let at_home = self.a.home[s.index()] == self.stage;
            let Some(w) = state.write.filter(|w| *w != state.read && at_home) else { continue };
            let due = match self.graph.producer(w) {
                Some(n) => {
                    list_of(self.graph, &self.transfers.once, n) == self.list
                        && !self.transfers.runs[n.index()].contains(&self.stage)
                }
                None => self.list == List::Update,
            };
            if due {
                let new = self.get(w, self.a.storage(s))?;
                pending.push((0, s, new));
            }
        }
        Ok(())
    }

    /// How long results of the current list live: those of the prologue serve all micro-batches.
    fn lasting(&self) -> Lasting {
        if self.list == List::Prologue { Lasting::Persistent } else { Lasting::ByUse }
    }

    /// Receives what only later lists use of the values made in this one by other stages.
    fn late_receives(&mut self) -> Result<(), CompileError> {
        (0..self.a.stages).try_for_each(|from| self.receive_up_to(StageId(from as u16), u32::MAX))
    }

    /// Receives what another stage sends in the current list, up to a message, in the order of sending.
    fn receive_up_to(&mut self, from: StageId, tag: u32) -> Result<(), CompileError> {
        let Some(due) = self.expected.get_mut(&(from, self.list)) else { return Ok(()) };
        let later = due.split_off(&tag.saturating_add(1));
        let now = std::mem::replace(due, later);
        for (tag, v) in now {
            let spec = self.transfers.of[&v][&self.stage].spec.clone();
            let output = self.buffer(v, &spec, self.lasting())?;
            self.push(Instr::Recv { output, from: from.0.into(), tag });
            self.add_version(v, spec, output, self.list == List::Prologue);
        }
        Ok(())
    }

    /// The versions of a value that the current list may read.
    fn visible(&self, v: ValueId) -> Vec<Version> {
        let Some(all) = self.versions.get(&v) else { return Vec::new() };
        let mut seen: Vec<Version> = all.iter().filter(|x| x.persistent || x.list == self.list).cloned().collect();
        if self.list == List::Backward && !all.iter().any(|x| x.persistent) {
            // Of the forward list's versions, the smallest whole one: it is what the frame keeps.
            let bytes = |x: &Version| self.out.buffers[x.buffer.0 as usize].ty.bytes();
            let kept =
                all.iter().filter(|x| x.list == List::Forward && x.spec.partial.is_empty()).min_by_key(|x| bytes(x));
            if let Some(kept) = kept {
                let least = bytes(kept);
                seen.extend(
                    all.iter()
                        .filter(|x| x.list == List::Forward && x.spec.partial.is_empty() && bytes(x) == least)
                        .cloned(),
                );
            }
        }
        seen
    }

    /// A buffer with a value in a spec, made by inserting what it takes into the current list.
    fn get(&mut self, v: ValueId, want: &Spec) -> Result<BufferId, CompileError> {
        let seen = self.visible(v);
        if let Some(x) = seen.iter().find(|x| x.spec == *want) {
            return Ok(x.buffer);
        }
        if seen.is_empty() {
            return self.materialise(v, want);
        }
        let ty = self.graph.ty(v).clone();
        let mut best: Option<(u64, Version, Vec<reshard::Step>)> = None;
        let mut reason = String::new();
        for x in seen {
            match self.steps(&x.spec, want, &ty) {
                Ok(steps) => {
                    let cost = reshard::weight(&x.spec, &steps, &ty, &self.a.mesh);
                    if best.as_ref().is_none_or(|(c, _, s)| (cost, steps.len()) < (*c, s.len())) {
                        best = Some((cost, x, steps));
                    }
                }
                Err(e) => reason = e.to_string(),
            }
        }
        let Some((_, from, steps)) = best else {
            return Err(CompileError::Reshard { place: self.place(v), reason });
        };
        let mut at = from.buffer;
        for step in steps {
            at = self.step(v, at, step)?;
        }
        Ok(at)
    }

    /// The steps between two specs; where they are partial in different ways, through a whole value.
    fn steps(&self, from: &Spec, want: &Spec, ty: &Type) -> Result<Vec<reshard::Step>, reshard::ReshardError> {
        let mesh = &self.a.mesh;
        reshard::reshard(from, want, ty, mesh).or_else(|e| {
            if from.partial.is_empty() || want.partial.is_empty() {
                return Err(e);
            }
            let whole = from.combined();
            let mut steps = reshard::reshard(from, &whole, ty, mesh)?;
            steps.extend(reshard::reshard(&whole, want, ty, mesh)?);
            Ok(steps)
        })
    }

    /// The first version of a value in this stage.
    fn materialise(&mut self, v: ValueId, want: &Spec) -> Result<BufferId, CompileError> {
        match self.graph.value(v).def.clone() {
            Def::Const(t) => {
                let spec = want.combined();
                let buffer = self.buffer(v, &spec, Lasting::Persistent)?;
                self.out.constants.push((buffer, t));
                self.add_version(v, spec, buffer, true);
            }
            Def::Input(port) => {
                let spec = self.a.inputs[port].clone();
                let output = self.buffer(v, &spec, Lasting::ByUse)?;
                self.push(Instr::Feed { port, output });
                self.add_version(v, spec, output, false);
            }
            Def::State(_) | Def::Node(..) => {
                let transfer = self.transfers.of.get(&v).and_then(|m| m.get(&self.stage)).cloned();
                let from = crate::transfer::home(self.graph, self.a, self.specs, v).map(|h| h.0);
                if let (Some(t), Some(from)) = (transfer, from)
                    && t.list == self.list
                {
                    self.receive_up_to(from, t.tag)?;
                } else if self.list == List::Backward && self.reduce_in_forward(v)? {
                    // Now there is a whole version that the frame keeps.
                } else {
                    return Err(CompileError::Unavailable {
                        value: self.place(v),
                        stage: self.stage.0.into(),
                        list: self.list,
                    });
                }
            }
        }
        self.get(v, want)
    }

    /// Combines a value that the forward list has as partial only, at its end, so that the backward list can use it.
    fn reduce_in_forward(&mut self, v: ValueId) -> Result<bool, CompileError> {
        if !self.versions.get(&v).is_some_and(|all| all.iter().any(|x| x.list == List::Forward)) {
            return Ok(false);
        }
        self.list = List::Forward;
        let made = self.whole(v);
        self.list = List::Backward;
        made.map(|_| true)
    }

    fn step(&mut self, v: ValueId, input: BufferId, step: reshard::Step) -> Result<BufferId, CompileError> {
        let output = self.buffer(v, &step.spec, Lasting::ByUse)?;
        let instr = match &step.kind {
            StepKind::Slice { dim, axes: x } => Instr::Slice { input, output, dim: *dim, axes: axes(x) },
            StepKind::AllGather { dim, axes: x } => Instr::AllGather { input, output, dim: *dim, axes: axes(x) },
            StepKind::AllReduce { kind, axes: x } => Instr::AllReduce { input, output, kind: *kind, axes: axes(x) },
            StepKind::ReduceScatter { dim, kind, axes: x } => {
                Instr::ReduceScatter { input, output, dim: *dim, kind: *kind, axes: axes(x) }
            }
            StepKind::AllToAll { gather, split, axes: x } => {
                Instr::AllToAll { input, output, gather: *gather, split: *split, axes: axes(x) }
            }
            StepKind::ZeroUnlessFirst { axes: x } => {
                self.push(Instr::Copy { input, output });
                Instr::ZeroUnlessFirst { buffer: output, axes: axes(x) }
            }
            StepKind::Dispatch { .. }
            | StepKind::Combine { .. }
            | StepKind::KeepRows { .. }
            | StepKind::PlaceRows { .. } => {
                return Err(CompileError::OnlyEstimate("rows that lie with their experts are not exchanged yet"));
            }
        };
        self.push(instr);
        self.add_version(v, step.spec, output, false);
        Ok(output)
    }
}
