// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls that the standard library does not wrap. Apart from [`MappedView`],
//! [`FileMapping`] and [`GpuRead`], all unsafe code of this crate is here.
//!
//! [`MappedView`]: crate::MappedView
//! [`FileMapping`]: crate::FileMapping
//! [`GpuRead`]: crate::GpuRead

#[cfg(target_os = "linux")]
mod cufile;
#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
mod mapping;
#[cfg(not(target_os = "linux"))]
mod portable;
#[cfg(target_os = "linux")]
mod ring;

#[cfg(target_os = "linux")]
pub(crate) use cufile::{CuFile, CuFileHandle, CuFileRead, NO_ASYNC};
#[cfg(target_os = "linux")]
pub(crate) use linux::*;
#[cfg(target_os = "linux")]
pub(crate) use mapping::{Mapping, populate_mapped, read_mapped_at};
#[cfg(not(target_os = "linux"))]
pub(crate) use portable::*;
#[cfg(target_os = "linux")]
pub(crate) use ring::{Op, Ring, probe_ring};
