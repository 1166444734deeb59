//! What differs between the processors.

use framehop::aarch64::{PtrAuthMask, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{UnwindRegsX86_64, UnwinderX86_64};

use crate::sampler::record::Registers;

/// A framehop unwinder that can begin from our registers.
pub(crate) trait Machine: framehop::Unwinder {
    /// The registers as framehop wants them; `None` if they are of another machine.
    fn registers(&self, registers: Registers) -> Option<Self::UnwindRegs>;
}

impl<D: std::ops::Deref<Target = [u8]>, P: framehop::AllocationPolicy> Machine
    for UnwinderX86_64<D, P>
where
    Self: framehop::Unwinder<UnwindRegs = UnwindRegsX86_64>,
{
    fn registers(&self, registers: Registers) -> Option<UnwindRegsX86_64> {
        match registers {
            Registers::X86_64 { ip, sp, bp } => Some(UnwindRegsX86_64::new(ip, sp, bp)),
            Registers::Aarch64 { .. } => None,
        }
    }
}

impl<D: std::ops::Deref<Target = [u8]>, P: framehop::AllocationPolicy> Machine
    for UnwinderAarch64<D, P>
where
    Self: framehop::Unwinder<UnwindRegs = UnwindRegsAarch64>,
{
    /// Functions built with `-mbranch-protection` sign their return addresses in the bits above
    /// those that a user address can have. Linux gives user programs 48 bits unless they ask for
    /// more; code never lies higher than the dynamic loader puts it.
    fn registers(&self, registers: Registers) -> Option<UnwindRegsAarch64> {
        const USER_ADDRESS_BITS: u32 = 48;
        match registers {
            Registers::Aarch64 { sp, fp, lr, .. } => {
                let mask = PtrAuthMask(u64::MAX >> (u64::BITS - USER_ADDRESS_BITS));
                Some(UnwindRegsAarch64::new_with_ptr_auth_mask(mask, lr, sp, fp))
            }
            Registers::X86_64 { .. } => None,
        }
    }
}
