// SPDX-License-Identifier: MIT OR Apache-2.0
use std::collections::BTreeMap;
use std::path::Path;

use ts_format::{CHUNK_LEN, Codec, Compression, ContainerWriter, SafetensorsLayout, TensorMeta};

use crate::atomic::{AtomicFile, Claim};
use crate::encode::{BATCH, Encoders, Ready};
use crate::{Checkpoint, Error};

/// What a file shall hold: a tensor's name, type, and address modulo 64 if it must have one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name.
    pub name: String,
    /// Its element type and shape.
    pub meta: TensorMeta,
    /// Where its data shall begin, modulo 64. `.ts` files keep this, 0 if `None`; safetensors files cannot.
    pub phase: Option<u8>,
}

/// How tensors are written to a `.ts` file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteOptions {
    /// What is done with their bytes.
    pub compression: Compression,
    /// Threads that compress; 0 for as many as there are cores.
    pub jobs: usize,
}

/// A container format, as a file's suffix names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.ts`
    Container,
    /// `.safetensors`
    Safetensors,
}

impl Format {
    /// The format that a path's suffix names.
    ///
    /// # Errors
    /// [`Error::UnknownSuffix`].
    pub fn of(path: &Path) -> Result<Self, Error> {
        match path.extension().and_then(|suffix| suffix.to_str()) {
            Some("ts") => Ok(Self::Container),
            Some("safetensors") => Ok(Self::Safetensors),
            _ => Err(Error::UnknownSuffix { path: path.into() }),
        }
    }
}

/// Whether a file's index lists just these tensors, with this metadata and fingerprint.
fn holds(
    there: &Checkpoint,
    tensors: &[NewTensor],
    metadata: &BTreeMap<String, String>,
    fingerprint: Option<u128>,
) -> bool {
    let catalog = there.catalog();
    let same = |t: &NewTensor| catalog.tensor(&t.name).is_some_and(|there| there.meta() == t.meta);
    catalog.tensors().len() == tensors.len()
        && tensors.iter().all(same)
        && catalog.files().iter().all(|file| file.metadata == *metadata)
        && fingerprint.is_none_or(|wanted| there.fingerprint() == Some(wanted))
}

/// Writes a `.ts` or `.safetensors` file that appears whole or not at all.
///
/// All tensors are declared first; then [`write`](Self::write) takes their bytes in the order that
/// [`order`](Self::order) says, and [`commit`](Self::commit) gives the file its name. If it is dropped before that,
/// or the process dies, what had the name before still has it.
#[derive(Debug)]
pub struct FileWriter {
    file: AtomicFile,
    tensors: Vec<NewTensor>,
    order: Vec<usize>,
    /// The place in `order` of the tensor that is being written, and how many of its bytes are missing.
    at: usize,
    missing: u64,
    container: Option<ContainerWriter>,
    compression: Compression,
    encoders: Vec<Encoders>,
    /// What becomes of the tensor that is being written.
    way: Way,
    /// Bytes of it that wait to be compressed.
    batch: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It is written as it comes.
    AsItIs,
    /// It is compressed,
    Compressed(Codec),
    /// or will be, if its first batch shows that it is worth it.
    Undecided(Codec),
}

impl FileWriter {
    /// Begins a file, in the format of its suffix. Waits for another process that writes the same one;
    /// `interrupt` is asked every 20 ms and ends the wait by returning true.
    ///
    /// # Errors
    /// [`Error::UnknownSuffix`], [`Error::Format`] when a tensor cannot be written, [`Error::Write`] when the
    /// system refuses, [`Error::Compression`], [`Error::Interrupted`].
    pub fn create(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Self, Error> {
        // A name that cannot be written has nothing made for it.
        let encoders = encoders(path, &tensors, options)?;
        Self::begin_file(Claim::new(path, interrupt)?, path, tensors, metadata, options, encoders)
    }

    fn begin_file(
        claim: Claim,
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: BTreeMap<String, String>,
        options: WriteOptions,
        encoders: Vec<Encoders>,
    ) -> Result<Self, Error> {
        let named: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), &t.meta)).collect();
        let (order, header, container) = match Format::of(path)? {
            Format::Container => ((0..tensors.len()).collect(), None, Some(ContainerWriter::new(metadata))),
            Format::Safetensors => {
                let layout = SafetensorsLayout::new(&named, &metadata)?;
                (layout.order, Some(layout.header), None)
            }
        };
        // What will be compressed takes nobody knows how much.
        let as_it_is = tensors.iter().filter(|t| options.compression.codec(t.meta.dtype).is_none());
        let expected: u64 = as_it_is.filter_map(|t| t.meta.byte_len()).fold(0, u64::saturating_add);
        let mut file = claim.begin(expected)?;
        if let Some(header) = header {
            file.write(&header)?;
        }
        let compression = options.compression;
        let (at, missing, way, batch) = (0, 0, Way::AsItIs, Vec::new());
        let mut this =
            Self { file, tensors, order, at, missing, container, compression, encoders, way, batch };
        this.begin()?;
        Ok(this)
    }

    /// As [`create`](Self::create), but `None` when `path` is there and holds just these tensors and this metadata:
    /// then there is nothing to write. With a `fingerprint` it must be that of the content too. Of several
    /// processes that write the same file, one does and the others wait and get `None`.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn unless_written(
        path: &Path,
        tensors: Vec<NewTensor>,
        metadata: &BTreeMap<String, String>,
        options: WriteOptions,
        fingerprint: Option<u128>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Self>, Error> {
        let written = |tensors: &[NewTensor]| {
            // Whatever is wrong with a file that is there, it is written anew.
            Checkpoint::open(path).is_ok_and(|there| holds(&there, tensors, metadata, fingerprint))
        };
        if written(&tensors) {
            return Ok(None);
        }
        let encoders = encoders(path, &tensors, options)?;
        let claim = Claim::new(path, interrupt)?;
        // It may have been written while this waited for its turn.
        if written(&tensors) {
            return Ok(None);
        }
        Self::begin_file(claim, path, tensors, metadata.clone(), options, encoders).map(Some)
    }

    /// Indices of the declared tensors, in the order in which their bytes are expected.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Takes the next bytes: of one tensor or of several, in pieces of any size. Blocks.
    ///
    /// # Errors
    /// [`Error::Write`], and [`Error::Format`] when the tensors have no more bytes.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            if self.at == self.order.len() {
                let (tensor, reason) = (String::new(), "all tensors are complete".into());
                return Err(ts_format::Error::Unwritable { tensor, reason }.into());
            }
            let room = match self.way {
                Way::AsItIs => usize::MAX,
                Way::Compressed(_) | Way::Undecided(_) => BATCH * CHUNK_LEN as usize - self.batch.len(),
            };
            let now = usize::try_from(self.missing).unwrap_or(usize::MAX).min(bytes.len()).min(room);
            let (piece, later) = bytes.split_at(now);
            match self.way {
                Way::AsItIs => self.write_as_it_is(piece)?,
                Way::Compressed(_) | Way::Undecided(_) => self.batch.extend_from_slice(piece),
            }
            self.missing -= now as u64;
            bytes = later;
            if self.way != Way::AsItIs && (self.missing == 0 || now == room) {
                self.write_batch()?;
            }
            if self.missing == 0 {
                self.at += 1;
                self.begin()?;
            }
        }
        Ok(())
    }

    /// Makes the file durable and gives it its name, replacing what had it.
    ///
    /// # Errors
    /// [`Error::Format`] when bytes are missing, [`Error::Write`]. What had the name before still has it then, unless it
    /// is only the directory that cannot be brought to the disk.
    pub fn commit(mut self) -> Result<(), Error> {
        if self.at < self.order.len() {
            let tensor = self.tensors[self.order[self.at]].name.clone();
            let reason = format!("{} of its bytes are missing", self.missing);
            return Err(ts_format::Error::Unwritable { tensor, reason }.into());
        }
        if let Some(container) = self.container {
            let ends = container.finish()?;
            self.file.seek(ends.index_offset)?;
            self.file.write(&ends.index)?;
            self.file.flush()?;
            self.file.seek(0)?;
            self.file.write(&ends.superblocks)?;
        }
        self.file.commit()
    }

    /// Begins the tensor at `at`, and those behind it as long as they are empty.
    fn begin(&mut self) -> Result<(), Error> {
        while let Some(&index) = self.order.get(self.at) {
            let meta = &self.tensors[index].meta;
            self.missing = meta.byte_len().unwrap_or(0);
            self.way = match self.compression.codec(meta.dtype) {
                Some(codec) if self.container.is_some() && self.missing > 0 => Way::Undecided(codec),
                _ => Way::AsItIs,
            };
            if self.way == Way::AsItIs {
                self.begin_as_it_is()?;
            }
            if self.missing > 0 {
                break;
            }
            self.at += 1;
        }
        Ok(())
    }

    fn begin_as_it_is(&mut self) -> Result<(), Error> {
        if let Some(container) = &mut self.container {
            let NewTensor { name, meta, phase } = &self.tensors[self.order[self.at]];
            let offset = container.begin(name, meta.clone(), *phase)?;
            self.file.seek(offset)?;
        }
        Ok(())
    }

    fn write_as_it_is(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if let Some(container) = &mut self.container {
            container.feed(bytes)?;
        }
        self.file.write(bytes)
    }

    /// Compresses what has gathered and writes it; or decides by it that the tensor stays as it is.
    fn write_batch(&mut self) -> Result<(), Error> {
        let batch = std::mem::take(&mut self.batch);
        let (Way::Compressed(codec) | Way::Undecided(codec)) = self.way else { return Ok(()) };
        let dtype = self.tensors[self.order[self.at]].meta.dtype;
        let encoders = self.encoders.iter_mut().find(|encoders| encoders.codec() == codec);
        let ready = encoders.expect("there are those of every codec in use").encode(dtype, &batch);
        if matches!(self.way, Way::Undecided(_)) {
            let stored = ready.iter().map(|(encoded, _)| encoded.len as u64).sum();
            if self.compression.is_worth(batch.len() as u64, stored) {
                self.way = Way::Compressed(codec);
                self.begin_chunked()?;
            } else {
                self.way = Way::AsItIs;
                self.begin_as_it_is()?;
                self.write_as_it_is(&batch)?;
            }
        }
        if self.way != Way::AsItIs {
            self.write_chunks(&ready)?;
        }
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    fn begin_chunked(&mut self) -> Result<(), Error> {
        let NewTensor { name, meta, phase } = &self.tensors[self.order[self.at]];
        let container = self.container.as_mut().expect("only .ts files are compressed");
        Ok(container.begin_chunked(name, meta.clone(), *phase)?)
    }

    fn write_chunks(&mut self, ready: &[Ready]) -> Result<(), Error> {
        let container = self.container.as_mut().expect("only .ts files are compressed");
        for (encoded, bytes) in ready {
            let offset = container.push_chunk(encoded)?;
            self.file.seek(offset)?;
            self.file.write(bytes)?;
        }
        Ok(())
    }
}

/// What compresses these tensors, if the file that `path` names can be compressed.
fn encoders(path: &Path, tensors: &[NewTensor], options: WriteOptions) -> Result<Vec<Encoders>, Error> {
    let WriteOptions { compression, jobs } = options;
    let refuse = |reason: String| Error::Compression { path: path.into(), reason };
    if Format::of(path)? == Format::Safetensors && compression != Compression::None {
        return Err(refuse("safetensors files are not compressed: name it .ts".into()));
    }
    let jobs = match jobs {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        jobs => jobs,
    };
    // Also a level that no tensor will need is looked at.
    let asked = if let Compression::By(codec, _) = compression { Some(codec) } else { None };
    let mut codecs: Vec<Codec> =
        tensors.iter().filter_map(|t| compression.codec(t.meta.dtype)).chain(asked).collect();
    codecs.sort_unstable();
    codecs.dedup();
    let make = |codec| Encoders::new(codec, compression.level(), jobs).map_err(refuse);
    codecs.into_iter().map(make).collect()
}
